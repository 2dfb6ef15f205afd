"""Finds what is not a number, names it, and counts how often a simulation had to be reset for it."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

FAULTS_SAID = 8


def not_finite(values: NDArray[Any]) -> NDArray[np.bool_] | None:
    """Return which rows of `values [N, D]` hold a NaN or an infinity, bool[N]; None: none, found by one sum."""
    if math.isfinite(np.add.reduce(values, axis=None)):
        return None
    bad: NDArray[np.bool_] = ~np.isfinite(values).all(axis=1)
    return bad if bad.any() else None  # the sum of large finite numbers can overflow


def first_not_finite(name: str, row: NDArray[Any]) -> str:
    """Return a text such as `action[3] is nan`."""
    place = int(np.flatnonzero(~np.isfinite(row))[0])
    return f"{name}[{place}] is {row[place]}"


class FaultCounter:
    """Counts the faults of each simulation; `counts int64[N]`. Logs the first few, then each doubling."""

    def __init__(self, task: str, count: int) -> None:
        self.counts = np.zeros(count, np.int64)
        self._task = task

    def add(self, simulation: int, step: int, what: str) -> None:
        """Count one fault of a simulation in a step of the run (counted from 1)."""
        self.counts[simulation] += 1
        total = int(self.counts.sum())
        if total <= FAULTS_SAID or total & (total - 1) == 0:
            log.warning(
                "%s, simulation %d, step %d: %s; it was reset (fault %d)", *(self._task, simulation, step, what, total)
            )
