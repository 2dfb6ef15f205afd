"""Which task comes next: a seeded order that a checkpoint can continue. Knows no environment and no policy."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinker_atropos.trajectory import TaskRef


def derive_seed(*parts: int | str) -> int:
    """Return a seed in [0, 2^31) that depends on all parts and on nothing else, the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") & 0x7FFFFFFF


@dataclass(frozen=True, slots=True)
class Issued:
    """One task given out: its place in the run's order, and the task."""

    ordinal: int
    task: TaskRef


class TaskStream:
    """The run's order of training tasks: each epoch a permutation of its own, seeded.

    An ordinal counts tasks given out over the whole run. It is open from `next()` until `end(ordinal)`; a cursor lists
    what is open, and a stream resumed from a cursor gives those out again first.
    """

    def __init__(self, split: str, size: int | None, seed: int, cursor: dict[str, Any] | None = None) -> None:
        self._split, self._size, self._seed = split, size, seed
        self._again: list[int] = sorted(cursor["open"]) if cursor else []
        self._next: int = cursor["next"] if cursor else 0
        self._open: set[int] = set()
        self._epoch: tuple[int, Any] = (-1, None)

    @property
    def size(self) -> int | None:
        """How many tasks the split has; None: endless."""
        return self._size

    def next(self) -> Issued:
        """Give out the next task."""
        if self._again:
            ordinal = self._again.pop(0)
        else:
            ordinal = self._next
            self._next += 1
        self._open.add(ordinal)
        return Issued(ordinal, self.task(ordinal))

    def end(self, ordinal: int) -> None:
        """Note that a task is consumed or discarded for good."""
        self._open.discard(ordinal)

    def reopen(self, ordinals: Iterable[int]) -> None:
        """Give these out again, before any new one."""
        again = set(ordinals)
        self._open -= again
        self._again = sorted(again | set(self._again))

    def task(self, ordinal: int) -> TaskRef:
        """Return the task at a place of the order."""
        if self._size is None:
            return TaskRef(self._split, ordinal, derive_seed(self._seed, "task", ordinal))
        epoch, place = divmod(ordinal, self._size)
        if self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng([self._seed, epoch]).permutation(self._size))
        return TaskRef(self._split, int(self._epoch[1][place]), derive_seed(self._seed, "task", ordinal))

    def cursor(self) -> dict[str, Any]:
        """Return a JSON-ready cursor."""
        return {"next": self._next, "open": sorted(self._open | set(self._again))}
