"""Problems, the weighted mix that training draws from, and the sets that an evaluation takes in turn."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tinker_atropos.errors import ConfigError

MAX_MIXED = 50_000_000  # problems in one pass over a mix


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer in LaTeX; which set it is of, and the number of its row there, 0 the first."""

    question: str
    answer: str
    set: str
    row: int

    @property
    def id(self) -> str:
        """Name it within a run."""
        return f"{self.set}/{self.row}"


class Mix:
    """Several sets in given proportions.

    One pass is as long as it takes for every problem to come at least once; those of a set whose weight is larger than
    its share of all problems come more often. Without weights a pass holds each problem once.
    """

    def __init__(self, sets: Mapping[str, Sequence[Problem]], weights: Mapping[str, float] | None = None) -> None:
        self._sets = [tuple(problems) for problems in sets.values()]
        shares = [float(len(problems)) if weights is None else weights[name] for name, problems in sets.items()]
        total = sum(shares)
        size = max(len(problems) * total / share for problems, share in zip(self._sets, shares, strict=True))
        if size > MAX_MIXED:
            least = min(sets, key=lambda name: weights[name] / len(sets[name]) if weights else 0.0)
            raise ConfigError(
                f"env.datasets: at the weight of {least!r} one pass over all problems would take {size:.0f} of them, "
                f"at most {MAX_MIXED} are possible; give it more weight, or fewer rows"
            )
        slots = [
            max(len(problems), round(size * share / total)) for problems, share in zip(self._sets, shares, strict=True)
        ]
        self._starts = [0, *itertools.accumulate(slots)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Problem:
        """Return a problem of the pass. The sets stand one after another: a run shuffles its tasks."""
        index %= len(self)
        which = bisect_right(self._starts, index) - 1
        problems = self._sets[which]
        return problems[(index - self._starts[which]) % len(problems)]


def in_turn(sets: Sequence[Sequence[Problem]]) -> list[Problem]:
    """Return the problems of all sets, one of each in turn, so that the first so many are of all of them alike."""
    longest = max((len(problems) for problems in sets), default=0)
    return [problems[row] for row in range(longest) for problems in sets if row < len(problems)]


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows `start` to `stop` of a data set, 0 the first, `stop` left out; None: to its end."""

    start: int
    stop: int | None

    def bounds(self, size: int) -> tuple[int, int]:
        """Return both ends in a set of so many rows; raises `ValueError` where they reach beyond it."""
        stop = size if self.stop is None else self.stop
        if self.start >= stop or stop > size:
            raise ValueError(f"{self} reaches beyond its {size} rows")
        return self.start, stop

    def __str__(self) -> str:
        return f"{self.start}:{'' if self.stop is None else self.stop}"


def read_range(text: str) -> RowRange:
    """Return the range that `100:500`, `100:` or `:16` means; raises `ValueError` for anything else."""
    start, colon, stop = text.strip().partition(":")
    if not colon or any(part and not (part.isascii() and part.isdigit() and len(part) < 16) for part in (start, stop)):
        raise ValueError("expected rows as START:STOP, 0 the first and STOP left out, such as 100:500, 100: or :16")
    rows = RowRange(int(start or 0), int(stop) if stop else None)
    if rows.stop is not None and rows.stop <= rows.start:
        raise ValueError(f"it holds no row: STOP must be larger than START, such as {rows.start}:{rows.start + 16}")
    return rows


def valid_weight(weight: float) -> bool:
    """Return whether a weight is one: finite and above 0."""
    return math.isfinite(weight) and weight > 0
