"""The numbers of one step, as they go into `metrics.jsonl`. Pure."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from tinker_atropos.errors import RunError
from tinker_atropos.rollout.collect import Counts, Discarded
from tinker_atropos.trajectory import Group


def step_metrics(
    step: int,
    groups: Sequence[Group],
    discarded: Sequence[Discarded],
    counts: Counts,
    update: Mapping[str, float],
    *,
    waited: float,
    trained: float,
) -> dict[str, float]:
    """Return the metrics of optimiser step `step` (1 is the first).

    `groups` were trained on, `discarded` ended untrained since the step before; `update` are the trainer's own metrics;
    `waited` and `trained` are seconds. Raises `RunError` if a number is not finite.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    # The reward curve counts what was filtered out too: without it a policy that gets everything right would show
    # only the groups in which it did not.
    left = [t for ended in discarded if ended.group is not None for t in ended.group.trajectories]
    rewards = np.array([trajectory.reward for trajectory in [*trajectories, *left]])
    sampled = sum(trajectory.sampled_tokens for trajectory in trajectories)
    staleness = [step - 1 - group.oldest_step for group in groups]
    took = waited + trained
    metrics: dict[str, float] = {
        "step": step,
        "time": time.time(),
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "reward/min": float(rewards.min()),
        "reward/max": float(rewards.max()),
        "reward/trained_mean": float(np.mean([trajectory.reward for trajectory in trajectories])),
        "staleness/mean": float(np.mean(staleness)),
        "staleness/max": float(max(staleness)),
        **{f"staleness/count_{age}": float(number) for age, number in sorted(Counter(staleness).items())},
        "tokens/sampled": float(sampled),
        "tokens/per_second": sampled / took if took > 0 else 0.0,
        "tokens/per_episode": sampled / len(trajectories),
        "episodes/truncated": sum(t.truncated or t.finish_reasons[-1] == "length" for t in trajectories)
        / len(trajectories),
        "episodes/turns": float(np.mean([len(trajectory.rewards) for trajectory in trajectories])),
        "groups/trained": float(len(groups)),
        **{f"groups/discarded/{reason}": float(n) for reason, n in sorted(counts.discarded.items())},
        **{f"episodes/failed/{cause}": float(n) for cause, n in sorted(counts.failures.items())},
        **{f"tokens/masked/{reason}": float(n) for reason, n in sorted(masked_tokens(groups).items())},
        "time/step": took,
        "time/wait_for_groups": waited,
        "time/update": trained,
        "trainer/busy": trained / took if took > 0 else 0.0,
    }
    names = sorted({name for trajectory in trajectories for name in trajectory.metrics})
    for name in names:
        values = [t.metrics[name] for t in trajectories if name in t.metrics]
        metrics[f"env/{name}"] = float(np.mean(values))
    metrics.update({name: float(value) for name, value in update.items()})
    bad = sorted(name for name, value in metrics.items() if not np.isfinite(value))
    if bad:
        raise RunError(
            f"step {step}: {', '.join(bad)} not finite ({metrics[bad[0]]}); lower the learning rate, then "
            f"continue from the last checkpoint with --resume"
        )
    return metrics


def masked_tokens(groups: Sequence[Group]) -> Counter[str]:
    """Return how many sampled tokens are not trained on, by reason."""
    counts: Counter[str] = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            counts.update(dict(trajectory.masked))
    return counts
