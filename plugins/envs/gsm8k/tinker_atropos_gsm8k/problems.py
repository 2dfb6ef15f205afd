"""What a problem is, and what every source of problems offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its exact answer."""

    question: str
    answer: Fraction


class Source(Protocol):
    """Problems by split and number; the same pair always gives the same problem."""

    def size(self, split: str) -> int | None:
        """Return how many problems a split has; None: endless; 0: there is no such split."""
        ...

    def problem(self, split: str, index: int) -> Problem:
        """Return one problem; `index` counts modulo the size."""
        ...


class FixedSource:
    """Problems that are all in memory."""

    def __init__(self, splits: Mapping[str, Sequence[Problem]]) -> None:
        self._splits = {split: tuple(problems) for split, problems in splits.items()}

    def size(self, split: str) -> int:
        """Return the number of problems in the split."""
        return len(self._splits.get(split, ()))

    def problem(self, split: str, index: int) -> Problem:
        """Return the problem at `index` modulo the size."""
        problems = self._splits[split]
        return problems[index % len(problems)]


class FirstOf:
    """The first so many problems of another source, by split; None takes them all."""

    def __init__(self, source: Source, limits: Mapping[str, int | None]) -> None:
        self._source = source
        self._limits = dict(limits)

    def size(self, split: str) -> int | None:
        """Return the smaller of the limit and the split's own size."""
        size, limit = self._source.size(split), self._limits.get(split)
        if limit is None:
            return size
        return limit if size is None else min(size, limit)

    def problem(self, split: str, index: int) -> Problem:
        """Return the problem at `index` modulo the size."""
        size = self.size(split)
        return self._source.problem(split, index if size is None else index % size)
