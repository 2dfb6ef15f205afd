"""The numbers of one update of a control run, as they go into `metrics.jsonl`. Pure."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from tinker_atropos.control import Fragment
from tinker_atropos.errors import RunError
from tinker_atropos.rollout.control import Counts


def control_metrics(
    step: int,
    env_steps: int,
    fragments: Sequence[Fragment],
    counts: Counts,
    update: Mapping[str, float],
    *,
    waited: float,
    trained: float,
    wall: float,
) -> dict[str, float]:
    """Return the metrics of update `step` (1 is the first), of which `fragments` were the batch.

    `episode/return` and `episode/length` are means over the episodes that ended in the batch, and absent without any.
    `waited` and `trained` are seconds, `wall` those since the line before. Raises `RunError` if a number is not finite.
    """
    episodes = [episode for fragment in fragments for episode in fragment.episodes]
    ages = [step - 1 - fragment.policy.step for fragment in fragments]
    metrics: dict[str, float] = {"step": step, "env_steps": env_steps, "time": time.time()}
    if episodes:
        metrics["episode/return"] = float(np.mean([total for total, _ in episodes]))
        metrics["episode/length"] = float(np.mean([length for _, length in episodes]))
    metrics |= {
        "episode/count": len(episodes),
        "env_steps/per_second": sum(fragment.steps for fragment in fragments) / wall if wall > 0 else 0.0,
        "staleness/mean": float(np.mean(ages)),
        "staleness/max": float(max(ages)),
        "trainer/busy": trained / wall if wall > 0 else 0.0,
        "time/step": wall,
        "time/wait_for_rollout": waited,
        "time/update": trained,
    }
    if counts.discarded_steps:
        metrics["env_steps/discarded"] = float(counts.discarded_steps)
    metrics |= {f"fragments/discarded/{reason}": float(n) for reason, n in sorted(counts.discarded.items())}
    if counts.restarts:
        metrics["rollout/workers_restarted"] = float(counts.restarts)
    if counts.broken:
        metrics["rollout/simulations_broken"] = float(counts.broken)
    metrics |= {name: float(value) for name, value in update.items()}
    bad = sorted(name for name, value in metrics.items() if not np.isfinite(value))
    if bad:
        raise RunError(
            f"step {step}: {', '.join(bad)} not finite ({metrics[bad[0]]}); lower the learning rate, then continue "
            "from the last checkpoint with --resume"
        )
    return metrics
