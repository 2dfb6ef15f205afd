"""Evaluation: the first tasks of the test split, one episode each, under one policy."""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import EpisodesFailed
from tinker_atropos.rollout.group import GroupPlan, run_group
from tinker_atropos.rollout.schedule import derive_seed
from tinker_atropos.trainer import TextPolicy
from tinker_atropos.trajectory import TaskRef, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """`trajectories[i]` is that of test task i, None where its episode failed."""

    step: int
    trajectories: tuple[Trajectory | None, ...]

    def metrics(self) -> dict[str, float]:
        """Return means over the episodes that came through, and the counts of both kinds."""
        whole = [trajectory for trajectory in self.trajectories if trajectory is not None]
        names = sorted({name for trajectory in whole for name in trajectory.metrics})
        means = {
            f"eval/{name}": sum(values) / len(values)
            for name in names
            if (values := [t.metrics[name] for t in whole if name in t.metrics])
        }
        return {
            "eval/reward": sum(trajectory.reward for trajectory in whole) / len(whole),
            "eval/episodes": float(len(whole)),
            "eval/failed": float(len(self.trajectories) - len(whole)),
            "eval/truncated": sum(t.truncated or t.finish_reasons[-1] == "length" for t in whole) / len(whole),
            **means,
        }


async def evaluate(
    environment: Any, policy: TextPolicy, tokenizer: Any, plan: GroupPlan, *, tasks: int, in_flight: int, seed: int
) -> Evaluation:
    """Evaluate the first `tasks` test tasks; raises `EpisodesFailed` if not one episode came through."""
    single = dataclasses.replace(plan, size=1, min_size=1)
    room = asyncio.Semaphore(in_flight)
    errors: list[str] = []

    async def one(index: int) -> Trajectory | None:
        async with room:
            task = TaskRef("test", index, derive_seed(seed, "test", index))
            group, report = await run_group(
                environment,
                policy,
                tokenizer,
                task,
                single,
                id=f"eval-{index}",
                seed=derive_seed(seed, "eval", index),
                compare=False,  # there is nothing to compare one episode with
            )
        if group is None:
            errors.append(report.last_error)
            return None
        return group.trajectories[0]

    episodes = [asyncio.create_task(one(index)) for index in range(tasks)]
    try:
        trajectories = tuple(await asyncio.gather(*episodes))
    finally:
        for episode in episodes:
            episode.cancel()
        await asyncio.gather(*episodes, return_exceptions=True)
    if all(trajectory is None for trajectory in trajectories):
        raise EpisodesFailed(f"all {tasks} evaluation episodes failed; the last cause: {errors[-1]}")
    return Evaluation(policy.ref.step, trajectories)
