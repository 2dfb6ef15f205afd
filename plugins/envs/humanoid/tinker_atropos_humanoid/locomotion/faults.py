"""Finds what is not a number, names it, and counts how often a simulation had to be reset for it."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker_atropos.errors import RunError

log = logging.getLogger(__name__)


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
    """Counts the faults of each simulation; `counts int64[N]`. Raises `RunError` when there are more than `limit`."""

    def __init__(self, task: str, count: int, limit: int) -> None:
        self.counts = np.zeros(count, np.int64)
        self._task = task
        self._limit = limit

    def add(self, simulation: int, step: int, what: str) -> None:
        """Count one fault of a simulation in a step of the run (counted from 1)."""
        self.counts[simulation] += 1
        total = int(self.counts.sum())
        said = f"{self._task}, simulation {simulation}, step {step}: {what}"
        if total > self._limit:
            raise RunError(
                f"{said}; that is fault {total}, and env.fault_limit is {self._limit}. Look for a learning rate that "
                "is too high (NaN actions) or rewards that drive the physics apart; a higher env.fault_limit goes on"
            )
        log.warning("%s; it was reset (fault %d of at most %d)", said, total, self._limit)
