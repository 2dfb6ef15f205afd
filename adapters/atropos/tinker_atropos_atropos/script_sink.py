"""Counts what reaches the run, and leaves out groups of equal scores, which scripts are told to send on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from tinker_atropos.external import GroupSink, RunInfo
from tinker_atropos.trajectory import Group

EQUAL = "equal scores"


class CountingSink:
    """A sink that knows when something last arrived. `clock` is in seconds."""

    def __init__(self, sink: GroupSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self.info: RunInfo = sink.info
        self.accepted = self.discarded = self.equal_in_a_row = 0
        self.last_arrival: float | None = None

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self._sink.step

    @property
    def waiting(self) -> int:
        """Trajectories that wait to be trained on."""
        return self._sink.waiting

    async def put(self, group: Group, *, wait: float | None = None) -> Literal["accepted", "duplicate", "blocked"]:
        """Add a group; one that nothing can be learnt from is discarded with its reason, and so is dealt with."""
        if self.info.filter_equal and nothing_to_learn(group):
            self.equal_in_a_row += 1
            self._arrived()
            self.discarded += 1
            self._sink.discard(group, EQUAL)
            return "accepted"
        answer = await self._sink.put(group, wait=wait)
        if answer == "accepted":
            self.equal_in_a_row = 0
            self.accepted += 1
            self._arrived()
        return answer

    def discard(self, group: Group, reason: str) -> None:
        """Record a group that arrived and can't be trained on."""
        self.discarded += 1
        self._arrived()
        self._sink.discard(group, reason)

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add numbers to the next line of metrics."""
        self._sink.metrics(values)

    def say(self, line: str) -> None:
        """Show one line."""
        self._sink.say(line)

    def _arrived(self) -> None:
        self.last_arrival = self._clock()


def nothing_to_learn(group: Group) -> bool:
    """Whether all scores are equal and no token has an advantage of its own (as in distillation)."""
    own = any(segment.advantages is not None for each in group.trajectories for segment in each.segments)
    return not own and len(set(group.scores)) <= 1
