"""The numbers of one step, as they go into `metrics.jsonl`. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tinker_atropos.errors import RunError
from tinker_atropos.rollout.source import Discarded
from tinker_atropos.trajectory import Group, Trajectory


def step_metrics(
    step: int,
    groups: Sequence[Group],
    discarded: Sequence[Discarded],
    failures: Mapping[str, int],
    update: Mapping[str, float],
    *,
    waited: float,
    trained: float,
    took: float,
) -> dict[str, float]:
    """Return the metrics of optimiser step `step` (1 is the first).

    `groups` were trained on, `discarded` ended untrained since the step before, `failures` counts failed tries of
    episodes by cause, `update` are the trainer's own metrics. Seconds: `waited` for groups, `trained` in the update,
    `took` since the line before, evaluations and checkpoints included. Raises `RunError` if a number is not finite.
    """
    trained_on = [trajectory for group in groups for trajectory in group.trajectories]
    untrained = [t for ended in discarded if ended.group is not None for t in ended.group.trajectories]
    metrics: dict[str, float] = {
        "step": step,
        "time": time.time(),
        **_rewards(trained_on, [*trained_on, *untrained]),
        **_staleness([step - 1 - group.oldest_step for group in groups]),
        **_tokens(trained_on, untrained, took),
        "groups/trained": float(len(groups)),
        **_counts("groups/discarded", Counter(ended.reason for ended in discarded)),
        **_counts("episodes/failed", failures),
        "time/step": took,
        "time/wait_for_groups": waited,
        "time/update": trained,
        "trainer/busy": min(1.0, trained / took) if took > 0 else 0.0,
        **{name: float(value) for name, value in update.items()},
    }
    bad = sorted(name for name, value in metrics.items() if not np.isfinite(value))
    if bad:
        raise RunError(
            f"step {step}: {', '.join(bad)} not finite ({metrics[bad[0]]}); lower the learning rate, then continue "
            "from the last checkpoint with --resume"
        )
    return metrics


def _rewards(trained_on: Sequence[Trajectory], ended: Sequence[Trajectory]) -> dict[str, float]:
    """The curves count what was filtered out too: see docs/decisions/0003."""
    rewards = np.array([trajectory.reward for trajectory in ended])
    numbers = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/trained_mean": float(np.mean([trajectory.reward for trajectory in trained_on])),
        "episodes/ended": float(len(ended)),
        "episodes/truncated": float(np.mean([was_truncated(trajectory) for trajectory in ended])),
        "episodes/turns": float(np.mean([len(trajectory.rewards) for trajectory in ended])),
    }
    for name in sorted({name for trajectory in ended for name in trajectory.metrics}):
        numbers[f"env/{name}"] = float(np.mean([t.metrics[name] for t in ended if name in t.metrics]))
    return numbers


def _staleness(ages: Sequence[int]) -> dict[str, float]:
    counts = {f"staleness/count_{age}": float(number) for age, number in sorted(Counter(ages).items())}
    return {"staleness/mean": float(np.mean(ages)), "staleness/max": float(max(ages)), **counts}


def _tokens(trained_on: Sequence[Trajectory], untrained: Sequence[Trajectory], took: float) -> dict[str, float]:
    trained = sum(trajectory.sampled_tokens for trajectory in trained_on)
    sampled = trained + sum(trajectory.sampled_tokens for trajectory in untrained)
    masked: Counter[str] = Counter()
    for trajectory in trained_on:
        masked.update(dict(trajectory.masked))
    return {
        "tokens/sampled": float(sampled),
        "tokens/trained": float(trained),
        "tokens/per_second": sampled / took if took > 0 else 0.0,
        "tokens/per_episode": sampled / (len(trained_on) + len(untrained)),
        **_counts("tokens/masked", masked),
    }


def _counts(prefix: str, counts: Mapping[str, int]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(number) for name, number in sorted(counts.items())}


def was_truncated(trajectory: Trajectory) -> bool:
    """Whether an episode was cut off, by its length limit, its context, its turn limit or its environment."""
    return trajectory.truncated or trajectory.finish_reasons[-1:] == ("length",)
