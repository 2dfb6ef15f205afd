"""Scores a model on an environment, outside of a run: what `tinker-atropos eval` does."""
