"""Collects fragments from shards of simulations in a thread of its own, and hands them to the run in batches.

Collection runs ahead of the trainer as far as `max_staleness` lets it, and no further: with 0 it waits for each update,
so the order of everything is fixed (the `sync` schedule is just that). While one shard's simulations step, the actions
of the next are chosen.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from tinker_atropos.control import ControlPolicy, Fragment
from tinker_atropos.errors import RunError
from tinker_atropos.rollout.fragments import Lane
from tinker_atropos.rollout.shards import CLOSE_SECONDS, ShardLost

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
STARTING_SECONDS = 0.01  # between two looks at a shard that is coming back


@dataclass(frozen=True, slots=True)
class Pace:
    """How far and how much to collect: `fragment_steps` steps of each simulation of a shard are one fragment.

    `batch_steps` environment steps make a batch; a run has `total_updates` of them. `max_staleness` counts updates.
    """

    fragment_steps: int
    batch_steps: int
    total_updates: int
    max_staleness: int


@dataclass(slots=True)
class Counts:
    """What happened since the last time somebody asked."""

    discarded: Counter[str]
    discarded_steps: int = 0
    restarts: int = 0
    broken: int = 0


class ControlCollector:
    """Runs lanes in a thread. All methods but the thread's own belong to the event loop's thread."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        pace: Pace,
        *,
        seed: int,
        lineage: int,
        first_update: int,
        say: Callable[[str], None],
    ) -> None:
        self._lanes, self._pace, self._seed, self._lineage = tuple(lanes), pace, seed, lineage
        self._first_update, self._say = first_update, say
        self._policy: ControlPolicy | None = None
        self._changed = threading.Condition()
        self._ready: list[tuple[int, int, Fragment]] = []  # (ordinal, lane, fragment)
        self._batches = 0  # handed out
        self._pending = 0  # environment steps begun or collected, and neither handed out nor discarded
        self._ordinal = 0
        self._stopped = False
        self._failure: BaseException | None = None
        self._counts = Counts(Counter())
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()

    @property
    def ordinal(self) -> int:
        """How many fragments were begun; the number of the next."""
        return self._ordinal

    def open(self, states: Sequence[Mapping[str, Any]] | None = None, ordinal: int = 0) -> None:
        """Begin the episodes, or continue those of a snapshot. Blocking: call it in a thread."""
        self._ordinal = ordinal
        for lane in self._lanes:  # all begin at once, then all are waited for
            lane.reset(self._seed, self._first_update)
        for place, lane in enumerate(self._lanes):
            try:
                lane.finish_reset()
            except ShardLost as error:
                raise RunError(
                    f"{error}, before its first step. {_advice(error)}. rollout.workers=thread does without worker "
                    "processes"
                ) from error
            if states is not None:
                lane.restore(states[place])

    def publish(self, policy: ControlPolicy) -> None:
        """Act with this policy from the next fragment on; the first call starts the thread."""
        with self._changed:
            self._policy = policy
            self._changed.notify_all()
        if self._thread is None:
            self._loop = asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._run, name="collector", daemon=True)
            self._thread.start()

    async def batch(self, step: int) -> tuple[Fragment, ...]:
        """Return the fragments of the update after `step` updates, none staler than allowed, in their order."""
        while True:
            self._arrived.clear()
            taken = self._take(step)
            if taken is not None:
                return taken
            await self._arrived.wait()

    def release(self, fragments: Sequence[Fragment]) -> None:
        """Take back the arrays of fragments that were trained on."""
        with self._changed:
            self._release(fragments)

    def take_counts(self) -> Counts:
        """Return what happened since the last call."""
        with self._changed:
            counts, self._counts = self._counts, Counts(Counter())
        return counts

    def snapshot(self) -> list[dict[str, Any]] | None:
        """Return the state of every lane, None where a worker is found lost; it is replaced. Blocking.

        Only while the thread waits for a policy: between two updates of `sync`.
        """
        with self._changed:
            assert not any(lane.filling or lane.starting for lane in self._lanes), "a snapshot is taken between updates"
            states = []
            for lane in self._lanes:
                try:
                    states.append(lane.snapshot())
                except ShardLost as error:
                    self._lost(lane, error)
            return states if len(states) == len(self._lanes) else None

    def close(self) -> None:
        """Stop and free the simulations. Blocking."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        thread = self._thread
        if thread is not None:
            # Ending a worker process ends the wait for it. A step of this process can't be ended, only waited for.
            ends = all(lane.shard.close_ends_wait for lane in self._lanes)
            thread.join(timeout=1.0 if ends else CLOSE_SECONDS)
            if thread.is_alive() and not ends:
                self._say(f"a step did not end within {CLOSE_SECONDS:g} s; its simulations are left open")
                return
        for lane in self._lanes:
            with suppress(Exception):
                lane.shard.close()
        if thread is not None:
            thread.join(timeout=CLOSE_SECONDS)

    def _take(self, step: int) -> tuple[Fragment, ...] | None:
        with self._changed:
            if self._failure is not None:
                raise self._failure
            oldest = step - self._pace.max_staleness
            stale = [entry for entry in self._ready if entry[-1].policy.step < oldest]
            if stale:
                self._ready = [entry for entry in self._ready if entry[-1].policy.step >= oldest]
                for *_, fragment in stale:
                    self._counts.discarded["stale"] += 1
                    self._counts.discarded_steps += fragment.steps
                    self._pending -= fragment.steps
                self._release([fragment for *_, fragment in stale])
            self._ready.sort(key=lambda entry: entry[:2])
            taken, steps = 0, 0
            while taken < len(self._ready) and steps < self._pace.batch_steps:
                steps += self._ready[taken][-1].steps
                taken += 1
            if steps < self._pace.batch_steps:
                return None
            batch, self._ready = self._ready[:taken], self._ready[taken:]
            self._batches += 1
            self._pending -= steps
            # By lane: which lane of several was the first to hear of a policy must not matter.
            return tuple(fragment for *_, fragment in sorted(batch, key=lambda entry: (entry[1], entry[0])))

    def _release(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            for lane in self._lanes:
                if lane.release(fragment.id):
                    break
        self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._stopped:
                moved = [self._advance(lane) for lane in self._lanes]
                if not any(moved):
                    with self._changed:
                        if any(lane.starting for lane in self._lanes):
                            self._changed.wait(STARTING_SECONDS)
                        elif not self._stopped and not self._may_begin():
                            self._changed.wait()
        except BaseException as error:
            if not self._stopped:
                with self._changed:
                    self._failure = error
                self._tell()

    def _advance(self, lane: Lane) -> bool:
        """Bring a lane one step on; False if it waits for a policy."""
        try:
            if lane.starting:
                if not lane.shard.ready():
                    return False  # the others go on while a lost shard comes back
                lane.finish_reset()
            if lane.filling:
                lane.receive()
                if lane.full:
                    self._complete(lane)
            if not lane.filling and not self._begin(lane):
                return False
            lane.send()
        except ShardLost as error:
            if self._stopped:
                return True
            self._lost(lane, error)
        return True

    def _may_begin(self) -> bool:
        """Whether what is begun now can be trained on within the bound."""
        pace, policy = self._pace, self._policy
        assert policy is not None, "publish comes first"
        update = self._first_update + self._batches + self._pending // pace.batch_steps
        return update < pace.total_updates and update - policy.ref.step <= pace.max_staleness

    def _begin(self, lane: Lane) -> bool:
        with self._changed:
            if self._stopped or not (lane.owed or self._may_begin()):
                return False
            assert self._policy is not None, "publish comes first"
            steps = lane.owed or self._pace.fragment_steps
            if not lane.owed:
                self._pending += steps * lane.num_envs
            lane.owed = 0
            lane.begin(f"{self._lineage}-{self._ordinal}", self._ordinal, self._policy, steps)
            self._ordinal += 1
        return True

    def _complete(self, lane: Lane, lost: bool = False) -> None:
        fragment = lane.fragment(lost)
        if not lost:
            lane.restarts_in_a_row = 0
        with self._changed:
            self._ready.append((lane.ordinal, lane.index, fragment))
        self._tell()

    def _lost(self, lane: Lane, error: ShardLost) -> None:
        """Hand on what a lost shard had done, and start it again; what is missing of its fragment is collected then."""
        cut = "its fragment is cut off there" if lane.filling else "its episodes are cut off there"
        if lane.filling:
            lane.owed = lane.steps - lane.t
            if lane.t:
                self._complete(lane, lost=True)
            else:
                lane.abandon()
        lane.restarts += 1
        lane.restarts_in_a_row += 1
        with self._changed:
            self._counts.restarts += 1
        if lane.restarts_in_a_row > MAX_RESTARTS:
            raise RunError(
                f"{error}, {lane.restarts_in_a_row} times without a whole fragment between; try "
                "rollout.workers=thread to see why, then continue with --resume"
            ) from error
        self._say(f"{error}; {cut}, and it is started again")
        lane.shard.restart()
        lane.reset(self._seed, self._first_update)

    def _tell(self) -> None:
        assert self._loop is not None, "publish comes first"
        with suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._arrived.set)


def _advice(error: ShardLost) -> str:
    if error.late:
        return "An environment that takes that long needs a longer rollout.step_timeout; one that hangs must be mended"
    return "What it wrote to stderr says why (a script that starts worker processes needs `if __name__ == '__main__':`)"
