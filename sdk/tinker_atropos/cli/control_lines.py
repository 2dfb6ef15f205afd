"""What `tinker-atropos run` says of a control run: how much it will do, and what it did."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinker_atropos.config import Config
    from tinker_atropos.run import Finished


def volume(config: Config) -> list[str]:
    """Return lines on how much a run simulates."""
    from tinker_atropos.rollout.control_plan import control_plan

    plan = control_plan(config)
    where = {"inline": "in this thread", "thread": "in threads", "process": "in worker processes"}[plan.workers]
    shards = "" if plan.shards == 1 else f", in {plan.shards} shards"
    evaluations = "; evaluations come on top" if config.env.steps_per_eval else ""
    return [
        f"{plan.total_updates:,} updates of {plan.batch_steps:,} environment steps ({plan.steps:,} steps of "
        f"{plan.num_envs} simulations{shards}, {where}; schedule {plan.schedule}): "
        f"{plan.total_updates * plan.batch_steps:,} in all{evaluations}",
        f"run folder {config.folder}",
    ]


def results(config: Config, finished: Finished) -> list[str]:
    """Return lines on what a finished run reached."""
    from tinker_atropos.rollout.control_plan import control_plan

    steps = finished.steps * control_plan(config).batch_steps
    lines = [f"finished {finished.steps:,} updates, {steps:,} environment steps, in {finished.folder}"]
    last = finished.last_evaluation
    if "eval/return" in last:
        lines.append(
            f"evaluation return {last['eval/return']:.2f}, spread {last['eval/return_std']:.2f}, over "
            f"{last['eval/episodes']:.0f} episodes of {last['eval/length']:.0f} steps in the mean"
        )
    return lines


def next_length(config: Config, finished: Finished) -> str:
    """Return the option that doubles a finished run."""
    from tinker_atropos.rollout.control_plan import control_plan

    return f"--env-steps {2 * finished.steps * control_plan(config).batch_steps}"
