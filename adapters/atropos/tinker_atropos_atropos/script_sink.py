"""A sink that counts what reaches the run, beside passing it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Literal

from tinker_atropos.external import GroupSink, RunInfo
from tinker_atropos.trajectory import Group


class CountingSink:
    """Knows how many groups came, and when the last one did. `clock` is in seconds."""

    def __init__(self, sink: GroupSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self.info: RunInfo = sink.info
        self.accepted = self.discarded = 0
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
        """Add a group."""
        answer = await self._sink.put(group, wait=wait)
        if answer == "accepted":
            self.accepted += 1
            self.last_arrival = self._clock()
        return answer

    async def discard(self, group: Group, reason: str) -> None:
        """Record a group that arrived and can't be trained on."""
        await self._sink.discard(group, reason)
        self.discarded += 1
        self.last_arrival = self._clock()

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add numbers to the next line of metrics."""
        self._sink.metrics(values)

    def say(self, line: str) -> None:
        """Show one line."""
        self._sink.say(line)
