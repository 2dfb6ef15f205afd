"""Rolls out episodes: text groups, their schedule, and evaluation."""
