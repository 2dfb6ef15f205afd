"""How a run's groups are made, beside its trainer: what training on text asks of either kind of environment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tinker_atropos.config import Config
from tinker_atropos.environment_state import EnvironmentState
from tinker_atropos.rollout.collect import Bounds, Collector
from tinker_atropos.rollout.evaluate import Evaluation, evaluate
from tinker_atropos.rollout.group import GroupPlan
from tinker_atropos.rollout.plan import group_plan, least_context
from tinker_atropos.rollout.policies import PolicyPool
from tinker_atropos.rollout.schedule import TaskStream
from tinker_atropos.rollout.source import GroupSource
from tinker_atropos.state import State
from tinker_atropos.trajectory import Group


@dataclass(frozen=True, slots=True, eq=False)
class SourceContext:
    """What a source of groups is joined to in one attempt.

    `cursor` None: the run's beginning. `left` are groups that wait in the state since before the attempt.
    """

    pool: PolicyPool
    state: State[Group]
    folder: Path
    lineage: int
    first_step: int
    cursor: Mapping[str, Any] | None
    on_group: Callable[[Group], None]
    say: Callable[[str], None]
    left: Sequence[Group] = ()


class Production(Protocol):
    """Makes a run's groups and evaluates its policies.

    `test_tasks` is how many tasks an evaluation has; `learned` what the environment learns during the run. `lasting`: a
    group ends with the manifest that counts it, not with its step, because nobody could make it again.
    """

    test_tasks: int
    lasting: bool
    learned: EnvironmentState

    def cap(self) -> int:
        """Return how many groups the state must hold, waiting and leased."""
        ...

    def state(self) -> State[Group] | None:
        """Return the state that the groups come in, where that is not for the run to choose."""
        ...

    async def open(self, pool: PolicyPool) -> None:
        """Learn from the first policy how groups are to be made; called in each attempt, before `source`."""
        ...

    def source(self, context: SourceContext) -> GroupSource:
        """Return the source of one attempt."""
        ...

    async def evaluate(self, pool: PolicyPool, tasks: int, step: int) -> Evaluation:
        """Play the first `tasks` test tasks with a policy of `step` or later."""
        ...


class EpisodeProduction:
    """Rolls out the episodes of a text environment in this process."""

    lasting = False

    def __init__(self, config: Config, environment: Any, test_tasks: int, tokenizer: Any) -> None:
        self.test_tasks = test_tasks
        self.learned = EnvironmentState(environment)
        self._config, self._environment, self._tokenizer = config, environment, tokenizer
        self._plan: GroupPlan | None = None
        self._eval_plan: GroupPlan | None = None

    def cap(self) -> int:
        """As much as staleness allows, and the batch that is being trained on."""
        return (self._config.max_staleness + 2) * self._config.groups_per_batch

    def state(self) -> None:
        """Whatever the run chooses."""

    async def open(self, pool: PolicyPool) -> None:
        """Take tokenizer and context length from the first policy."""
        config = self._config
        async with pool.use() as policy:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(policy.tokenizer)
            context = least_context(policy.context_length, config.env.max_token_length)
        self._plan = group_plan(config, self._environment, context)
        self._eval_plan = group_plan(config, self._environment, context, evaluation=True)

    def source(self, context: SourceContext) -> Collector:
        """Return a collector that goes on in the order of tasks."""
        config = self._config
        assert self._plan is not None, "open() comes first"
        bounds = Bounds(
            groups_per_batch=config.groups_per_batch,
            total_steps=config.env.total_steps,
            max_staleness=config.max_staleness,
            max_in_flight=config.env.max_num_workers if config.env.max_num_workers > 0 else None,
            filter_equal=config.env.ensure_scores_are_not_same,
            max_filtered_groups=config.rollout.max_filtered_groups,
            max_failed_groups=config.rollout.max_failed_groups,
        )
        cursor = dict(context.cursor) if context.cursor is not None else None
        return Collector(
            self._environment,
            context.pool,
            context.state,
            TaskStream("train", self._environment.tasks("train"), config.run.seed, cursor),
            self._plan,
            bounds,
            tokenizer=self._tokenizer,
            seed=config.run.seed,
            lineage=context.lineage,
            first_step=context.first_step,
            on_group=context.on_group,
        )

    async def evaluate(self, pool: PolicyPool, tasks: int, step: int) -> Evaluation:
        """Play the first test tasks at the evaluation's temperature."""
        config = self._config
        assert self._eval_plan is not None, "open() comes first"
        async with pool.use(step) as policy:
            return await evaluate(
                self._environment,
                policy,
                self._tokenizer,
                self._eval_plan,
                tasks=tasks,
                in_flight=config.openai.num_requests_for_eval or max(16, config.env.batch_size),
                seed=config.run.seed,
            )
