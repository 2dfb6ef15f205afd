"""Grading that somebody else's text can't hang: a function in child processes, each call bounded in time and memory."""

from __future__ import annotations

from tinker_atropos.grading.pool import Limits, WorkerPool

__all__ = ["Limits", "WorkerPool"]
