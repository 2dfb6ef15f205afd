"""Keeps groups in flight, as many as staleness allows; filters them and puts them into the state."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos.environment_state import why_skipped
from tinker_atropos.errors import FilteredOut
from tinker_atropos.rollout.group import GroupPlan, episodes_failed, run_group
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.schedule import Issued, TaskStream, derive_seed
from tinker_atropos.rollout.source import Discarded
from tinker_atropos.trajectory import Group

log = logging.getLogger(__name__)


class GroupStore(Protocol):
    """The part of State that a producer needs."""

    async def put(self, group: Group, /, *, wait: float | None = None) -> str: ...


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much may be in flight, and when to give up. Groups per batch, optimiser steps, counts of groups."""

    groups_per_batch: int
    total_steps: int
    max_staleness: int
    max_in_flight: int | None
    filter_equal: bool
    max_filtered_groups: int
    max_failed_groups: int


def group_id(lineage: int, ordinal: int) -> str:
    """Return the id of the group that the task at `ordinal` of the run's order becomes in a lineage."""
    return f"{lineage}-{ordinal:06d}"


class Collector:
    """The producer of a run's groups.

    A group may start when the step that will train on it lies at most `max_staleness` ahead of the newest policy.
    Groups are counted by the steps that take them, so nothing is started that is sure to be too old.
    """

    def __init__(
        self,
        environment: Any,
        pool: PolicyPool,
        store: GroupStore,
        stream: TaskStream,
        plan: GroupPlan,
        bounds: Bounds,
        *,
        tokenizer: Any,
        seed: int,
        lineage: int,
        first_step: int,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self._environment, self._pool, self._store, self._stream = environment, pool, store, stream
        self._size: int | None = stream.size
        self._plan, self._bounds, self._tokenizer = plan, bounds, tokenizer
        self._seed, self._lineage, self._on_group = seed, lineage, on_group
        self._taken = first_step * bounds.groups_per_batch
        self._kept = 0
        self._flying: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._filtered_in_a_row = self._failed_in_a_row = 0
        self._last_scores: tuple[float, ...] = ()
        self._ordinals: dict[str, int] = {}  # of the groups that were kept and have not ended
        self._failures: Counter[str] = Counter()
        self._discarded: list[Discarded] = []

    async def run(self) -> None:
        """Produce until cancelled. Raises `FilteredOut` or `EpisodesFailed` where going on makes no sense."""
        try:
            while True:
                while self._may_start():
                    self._flying.add(asyncio.create_task(self._roll(self._next())))
                    if len(self._flying) % 64 == 0:
                        await asyncio.sleep(0)  # a huge batch must not hold up the loop
                waker = asyncio.create_task(self._wake.wait())
                try:
                    await asyncio.wait({waker, *self._flying}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waker.cancel()
                self._wake.clear()
                ended = {task for task in self._flying if task.done()}
                self._flying -= ended
                failures = [error for task in ended if not task.cancelled() and (error := task.exception())]
                if failures:
                    raise failures[0]
        finally:
            flying = list(self._flying)
            for task in flying:
                task.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    def policy_changed(self) -> None:
        """A newer policy was adopted."""
        self._wake.set()

    def wanted(self, groups: Sequence[Group]) -> int:
        """Return how many groups more the next batch needs beside these."""
        return self._bounds.groups_per_batch - len(groups)

    def unfit(self, group: Group) -> str:
        """Whatever was kept is fit."""
        return ""

    def ordinal(self, id: str) -> int:
        """Return the place in the run's order of a group that was kept."""
        return self._ordinals[id]

    def taken(self, groups: Sequence[Group]) -> None:
        """The trainer took these into a step."""
        self._taken += len(groups)
        self._kept -= len(groups)
        self._wake.set()

    def discard(self, group: Group, reason: str) -> None:
        """A kept group ends without being trained on, and is replaced."""
        self._kept -= 1
        self._discarded.append(Discarded(group.id, group.task, reason, group, self._ordinals.pop(group.id)))
        self._wake.set()

    def recorded(self, discarded: Iterable[Discarded]) -> None:
        """Discarded tasks were written down, so a checkpoint may count them as ended."""
        for ended in discarded:
            self._stream.end(ended.ordinal)

    def consumed(self, group: Group) -> None:
        """A group was trained on."""
        self._stream.end(self._ordinals.pop(group.id))

    def tally(self) -> str:
        """Say how many groups are in flight, and what became of those that ended since the last step."""
        counts = Counter(ended.reason for ended in self._discarded)
        ended = "".join(f", {number} discarded ({reason})" for reason, number in sorted(counts.items()))
        return f"{len(self._flying)} groups in flight, {self._kept} ready{ended}"

    def take_failures(self) -> Counter[str]:
        """Return how many tries of episodes failed since the last call, by cause."""
        failures, self._failures = self._failures, Counter()
        return failures

    def take_metrics(self) -> Mapping[str, float]:
        """Episodes bring their own."""
        return {}

    def cursor(self) -> dict[str, Any]:
        """Return where the order of tasks stands, with the open ones."""
        return self._stream.cursor()

    def unfinished(self, pending: Sequence[Group]) -> list[Discarded]:
        """Return the kept groups among these; a resume gives their tasks out again."""
        return [
            Discarded(group.id, group.task, "stopped", group, self._ordinals[group.id])
            for group in pending
            if group.id in self._ordinals
        ]

    def take_discarded(self) -> list[Discarded]:
        """Return what was discarded since the last call; their tasks stay open until `recorded`."""
        discarded, self._discarded = self._discarded, []
        # In the order of tasks, not of time: which episode ends first must not show in a seeded run.
        return sorted(discarded, key=lambda ended: ended.ordinal)

    def _may_start(self) -> bool:
        bounds, newest = self._bounds, self._pool.newest
        if newest is None:
            return False
        if bounds.max_in_flight is not None and len(self._flying) >= bounds.max_in_flight:
            return False
        steps = min(newest.step + bounds.max_staleness + 1, bounds.total_steps)
        return self._taken + self._kept + len(self._flying) < steps * bounds.groups_per_batch

    def _next(self) -> Issued:
        """Give out the next task that the environment does not skip; raises `FilteredOut` if it skips them all."""
        most = max(self._size or 0, self._bounds.max_filtered_groups) + 1
        reasons: Counter[str] = Counter()
        for _ in range(most):
            issued = self._stream.next()
            reason = why_skipped(self._environment, issued.task)
            if not reason:
                return issued
            reasons[reason] += 1
            id = group_id(self._lineage, issued.ordinal)
            self._discarded.append(Discarded(id, issued.task, reason, None, issued.ordinal))
        raise FilteredOut(
            f"the environment skips every task ({', '.join(f'{why}: {n}' for why, n in sorted(reasons.items()))}), "
            "so there is nothing left to learn from; widen its bounds, or use other tasks"
        )

    async def _roll(self, issued: Issued) -> None:
        id = group_id(self._lineage, issued.ordinal)
        async with self._pool.use() as policy:
            group, report = await run_group(
                self._environment,
                policy,
                self._tokenizer,
                issued.task,
                self._plan,
                id=id,
                seed=derive_seed(self._seed, "group", issued.ordinal),
            )
        self._failures.update(report.failures)
        if group is None:
            self._failed_in_a_row += 1
            self._discarded.append(Discarded(id, issued.task, "failed", None, issued.ordinal))
            if self._failed_in_a_row >= self._bounds.max_failed_groups:
                raise episodes_failed(self._failed_in_a_row, report.last_error)
            return
        self._failed_in_a_row = 0
        if self._bounds.filter_equal and len(set(group.scores)) == 1:
            self._filter(issued, group)
            return
        self._filtered_in_a_row = 0
        self._ordinals[id] = issued.ordinal
        self._kept += 1
        self._on_group(group)
        if await self._store.put(group) != "accepted":
            self._kept -= 1
            log.error("group %s was put twice; the second is dropped", id)

    def _filter(self, issued: Issued, group: Group) -> None:
        self._filtered_in_a_row += 1
        self._discarded.append(Discarded(group.id, issued.task, "equal_scores", group, issued.ordinal))
        if self._filtered_in_a_row >= self._bounds.max_filtered_groups:
            score = group.scores[0]
            raise FilteredOut(
                f"{self._filtered_in_a_row} groups in a row had equal scores (the last: {score:g} for each of "
                f"{len(group.scores)}), so there is nothing to learn from: the model "
                f"{'never' if score <= 0 else 'always'} earns the reward, or the reward can't tell its answers apart. "
                "Use easier or harder tasks, another model, a larger env.group_size, or "
                "env.ensure_scores_are_not_same=false to train on such groups all the same"
            )
