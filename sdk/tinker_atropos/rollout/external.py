"""Groups from an environment that drives itself: policy endpoints for it, a sink for what it makes."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tinker_atropos.config import Config
from tinker_atropos.environment_state import EnvironmentState
from tinker_atropos.errors import EpisodesFailed, FilteredOut, PluginError, RunError
from tinker_atropos.external import EndpointSettings, ExternalEnvironment, PolicyEndpoint, RunInfo
from tinker_atropos.rollout.evaluate import Evaluation
from tinker_atropos.rollout.plan import least_context
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.production import SourceContext
from tinker_atropos.rollout.source import Discarded
from tinker_atropos.state import State
from tinker_atropos.trajectory import Group

log = logging.getLogger(__name__)

INTERVAL = 10
"""For how many steps the state holds what was trained on; a longer interval of checkpoints is cut short."""

REFUSED = "refused"
"""The override under which a group that can't be trained on carries the reason."""


class ExternalProduction:
    """Lets an environment drive itself. What it handed in can't be made again, so it ends with a manifest only."""

    test_tasks = 0
    lasting = True

    def __init__(self, config: Config, environment: ExternalEnvironment) -> None:
        self._config, self._environment = config, environment
        self.learned = EnvironmentState(None)  # it keeps what it learns itself
        self._context: int | None = None

    def cap(self) -> int:
        """What may wait, and all that is trained on until a manifest counts it; a group has one trajectory at least.

        Where manifests are to be written at the end alone, they are written whenever this is filled.
        """
        interval = min(self._config.trainer.save_checkpoint_interval or INTERVAL, INTERVAL)
        return (self._config.max_staleness + 2 + interval) * self._config.env.batch_size

    def state(self) -> State[Group] | None:
        """Return the environment's own state, if it has one."""
        own: State[Group] | None = getattr(self._environment, "state", None)
        return own

    async def open(self, pool: PolicyPool) -> None:
        """Take the context length from the first policy."""
        async with pool.use() as policy:
            self._context = least_context(policy.context_length, self._config.env.max_token_length)
        begin = getattr(self.state(), "begin", None)
        if begin is not None:  # a state elsewhere tells others the run's sizes
            begin(self._info(self._config.folder, 0 if pool.newest is None else pool.newest.step))

    def source(self, context: SourceContext) -> ExternalSource:
        """Return the source of one attempt."""
        info = self._info(context.folder, context.first_step)
        return ExternalSource(self._environment, self._config, context, info)

    def _info(self, folder: Path, first_step: int) -> RunInfo:
        config = self._config
        if self._context is None:
            raise PluginError(
                "env.max_token_length: the policy states no context length, and the environment must be told one; "
                "set it"
            )
        return RunInfo(
            name=config.name,
            folder=folder,
            seed=config.run.seed,
            starting_step=first_step,
            total_steps=config.env.total_steps,
            batch_size=config.env.batch_size,
            group_size=config.env.group_size,
            max_token_length=self._context,
            checkpoint_interval=config.trainer.save_checkpoint_interval,
            steps_per_eval=config.env.steps_per_eval,
            filter_equal=config.env.ensure_scores_are_not_same,
            max_staleness=config.max_staleness,
        )

    async def evaluate(self, pool: PolicyPool, tasks: int, step: int) -> Evaluation:
        """The environment evaluates itself."""
        raise NotImplementedError("an environment that drives itself has no test tasks of ours")


class Sink:
    """A `GroupSink` over the state: at most `room` trajectories wait, so that what is trained on is fresh."""

    def __init__(self, state: State[Group], info: RunInfo, room: int, pool: PolicyPool, context: SourceContext) -> None:
        self.info = info
        self.numbers: dict[str, float] = {}
        self._state, self._room, self._pool, self._context = state, room, pool, context
        self._sizes: dict[str, int] = {}  # trajectories of the groups that wait to be trained on, or are being put
        self._there: set[str] = set()  # those that the state has accepted
        self._changed = asyncio.Condition()

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        newest = self._pool.newest
        return self.info.starting_step if newest is None else newest.step

    @property
    def waiting(self) -> int:
        """Trajectories that wait to be trained on."""
        return sum(self._sizes.values())

    async def put(self, group: Group, *, wait: float | None = None) -> Literal["accepted", "duplicate", "blocked"]:
        """Add a group; see `GroupSink.put`. Raises `PluginError` for one that no trainer could take."""
        check_group(group)
        size = 0 if REFUSED in group.overrides else len(group.trajectories)
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: group.id in self._sizes or not size or self.waiting < self._room)
                known = group.id in self._sizes
                self._sizes.setdefault(group.id, size)
        except TimeoutError:
            return "blocked"
        answer: Literal["accepted", "duplicate", "blocked"] = "blocked"
        try:
            left = None if wait is None else max(0.0, wait - (asyncio.get_running_loop().time() - began))
            answer = await self._state.put(group, wait=left)
        finally:
            if answer == "accepted" and group.id in self._sizes:
                self._there.add(group.id)
            elif not known and group.id not in self._there:  # nobody else has put it meanwhile
                await self.ended([group.id])
        if answer == "accepted":
            self._context.on_group(group)
        return answer

    def waits(self, groups: Iterable[Group]) -> None:
        """Count groups that the state held before this attempt."""
        self._sizes.update({group.id: len(group.trajectories) for group in groups if REFUSED not in group.overrides})

    async def discard(self, group: Group, reason: str) -> None:
        """Record a group that arrived and can't be trained on; it ends like any other, in the run's order."""
        await self.put(dataclasses.replace(group, overrides={**group.overrides, REFUSED: reason}))

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add numbers of the environment's own to the next line of metrics."""
        for name, value in values.items():
            if np.isfinite(value):
                self.numbers[f"env/{name}"] = float(value)
            else:
                log.warning("the environment's metric %s is %s; it is left out", name, value)

    def say(self, line: str) -> None:
        """Show one line to the user."""
        self._context.say(line)

    async def ended(self, ids: Iterable[str]) -> None:
        """Groups wait no more."""
        async with self._changed:
            for id in ids:
                self._sizes.pop(id, None)
                self._there.discard(id)
            self._changed.notify_all()


class ExternalSource:
    """A `GroupSource` whose groups come from an environment that drives itself.

    A group's place in the run's order is when it ended. A place that was given and not written down is given again.
    """

    def __init__(
        self,
        environment: ExternalEnvironment,
        config: Config,
        context: SourceContext,
        info: RunInfo,
    ) -> None:
        self._environment, self._config, self._context = environment, config, context
        room = (config.max_staleness + 1) * config.env.batch_size
        self._sink = Sink(context.state, info, room, context.pool, context)
        self._sink.waits(context.left)
        cursor = context.cursor or {"next": 0, "open": []}
        self._next, self._again = int(cursor["next"]), sorted(cursor["open"])
        self._ordinals: dict[str, int] = {}
        self._discarded: list[Discarded] = []
        self._equal_in_a_row = self._refused_in_a_row = 0
        self._endpoint: PolicyEndpoint | None = None
        self._seen: dict[str, int] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve the policy and let the environment drive itself; raises `RunError` if it ends before the run."""
        spec = self._config.adapter_spec
        given: Mapping[str, Any] = getattr(self._environment, "endpoint", {})
        settings = EndpointSettings(
            **{"model": self._config.model or "policy", "records": self._context.folder / "sampled", **given}
        )
        async with spec.endpoint(self._config.adapter, self._context.pool, settings) as endpoint:
            await endpoint.ready()
            self._endpoint = endpoint
            await self._environment.run(endpoint, self._sink)
        raise RunError(
            f"environment {self._config.environment_spec.name!r} ended before the run's last step; see run.log"
        )

    def policy_changed(self) -> None:
        """The endpoints sample from the newest policy by themselves."""

    def wanted(self, groups: Sequence[Group]) -> int:
        """One more group until the batch has `env.batch_size` trajectories: groups may be of any size."""
        return int(sum(len(group.trajectories) for group in groups) < self._config.env.batch_size)

    def unfit(self, group: Group) -> str:
        """Return why it was refused at the border, or `equal_scores`."""
        refused = group.overrides.get(REFUSED)
        if refused is not None:
            return str(refused)
        if self._config.env.ensure_scores_are_not_same and not learnable(group):
            return "equal_scores"
        return ""

    def ordinal(self, id: str) -> int:
        """Return the place in the run's order of a group that the trainer holds."""
        if id not in self._ordinals:
            if self._again:
                self._ordinals[id] = self._again.pop(0)
            else:
                self._ordinals[id], self._next = self._next, self._next + 1
        return self._ordinals[id]

    def taken(self, groups: Sequence[Group]) -> None:
        """The trainer took these into a step; there is room for others."""
        self._equal_in_a_row = self._refused_in_a_row = 0
        self._soon([group.id for group in groups])

    def discard(self, group: Group, reason: str) -> None:
        """Note a group that is not trained on; too many in a row end the run."""
        self._discarded.append(Discarded(group.id, group.task, reason, group, self.ordinal(group.id)))
        self._soon([group.id])
        if reason == "equal_scores":
            self._equal_in_a_row += 1
            if self._equal_in_a_row >= self._config.rollout.max_filtered_groups:
                raise FilteredOut(
                    f"{self._equal_in_a_row} groups in a row had equal scores (the last: {group.scores[0]:g} for each "
                    f"of {len(group.scores)}), so there is nothing to learn from. Use easier or harder tasks, another "
                    "model, a larger env.group_size, or env.ensure_scores_are_not_same=false"
                )
        elif reason == group.overrides.get(REFUSED):
            self._refused_in_a_row += 1
            if self._refused_in_a_row >= self._config.rollout.max_failed_groups:
                raise EpisodesFailed(
                    f"{self._refused_in_a_row} groups in a row can't be trained on (the last: {reason}); see run.log"
                )

    def consumed(self, group: Group) -> None:
        """A group was trained on."""
        self._ordinals.pop(group.id, None)

    def take_discarded(self) -> list[Discarded]:
        """Return what was discarded since the last call."""
        discarded, self._discarded = self._discarded, []
        return discarded

    def recorded(self, discarded: Iterable[Discarded]) -> None:
        """Their places are given for good."""
        for ended in discarded:
            self._ordinals.pop(ended.id, None)

    def take_failures(self) -> Counter[str]:
        """An environment that drives itself counts its own failures."""
        return Counter()

    def take_metrics(self) -> Mapping[str, float]:
        """Return what the environment reported since the last call, and what its endpoint saw."""
        numbers, self._sink.numbers = self._sink.numbers, {}
        seen = {} if self._endpoint is None else dict(self._endpoint.seen())
        numbers |= {f"endpoint/{name}": float(count - self._seen.get(name, 0)) for name, count in seen.items()}
        self._seen = seen
        return numbers

    def tally(self) -> str:
        """Say how much waits, and what became of the groups that ended since the last step."""
        counts = Counter(ended.reason for ended in self._discarded)
        ended = "".join(f", {number} groups discarded ({reason})" for reason, number in sorted(counts.items()))
        return f"{self._sink.waiting} trajectories ready{ended}"

    def cursor(self) -> dict[str, Any]:
        """Return where the order stands; open are places of groups that no step's rollouts hold yet."""
        return {"next": self._next, "open": sorted([*self._again, *self._ordinals.values()])}

    def unfinished(self, pending: Sequence[Group]) -> list[Discarded]:
        """Return what a state in this process's memory holds: it ends with the process."""
        return [Discarded(group.id, group.task, "stopped", group, self.ordinal(group.id)) for group in pending]

    def _soon(self, ids: Sequence[str]) -> None:
        task = asyncio.get_running_loop().create_task(self._sink.ended(ids))
        self._background.add(task)
        task.add_done_callback(self._background.discard)


def learnable(group: Group) -> bool:
    """Whether a group's own numbers tell its trajectories apart: scores that differ, or advantages of its own."""
    if len(set(group.scores)) > 1:
        return True
    return any(
        segment.advantages is not None and bool(np.any(segment.advantages[segment.mask]))
        for trajectory in group.trajectories
        for segment in trajectory.segments
    )


def check_group(group: Group) -> None:
    """Raise `PluginError` for a group that no trainer could take; says which trajectory is at fault."""
    if not group.trajectories:
        raise PluginError(f"group {group.id!r} has no trajectory")
    for place, trajectory in enumerate(group.trajectories):
        if not all(np.isfinite(reward) for reward in trajectory.rewards):
            raise PluginError(
                f"group {group.id!r}, trajectory {place}: a reward is {trajectory.rewards}; it must be finite"
            )
        if not trajectory.rewards:
            raise PluginError(f"group {group.id!r}, trajectory {place} has no reward; give one a turn, 0 if need be")
        for segment in trajectory.segments:
            if segment.advantages is not None and not np.isfinite(segment.advantages).all():
                raise PluginError(f"group {group.id!r}, trajectory {place}: an advantage is not finite")
