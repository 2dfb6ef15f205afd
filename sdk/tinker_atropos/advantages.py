"""Advantages: how much better each trajectory of a group did than its peers. Pure functions; they know no trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np

from tinker_atropos.errors import ConfigError, DataError, near
from tinker_atropos.trajectory import FloatArray, Group, Segment

Estimator: TypeAlias = Literal["grpo", "rloo", "normalized"]

ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)

NORMALIZED_EPSILON = 1e-6
"""Added to the standard deviation in `normalized`, in units of the reward."""


def group_advantages(rewards: Sequence[float], estimator: Estimator = "grpo") -> FloatArray:
    """Return `float32[G]`, the advantage of each of the `G` rewards of one group, computed in float64.

    With `m` the mean of the group:

    - `grpo`: `r_i - m`. GRPO's baseline without its division by the standard deviation, which weighs tasks by how hard
      they are (Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv 2503.20783).
    - `rloo`: `r_i - mean of the others = G / (G - 1) * (r_i - m)` (Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a
      Baseline for Free!"; Ahmadian et al. 2024, arXiv 2402.14740).
    - `normalized`: `(r_i - m) / (s + 1e-6)`, `s` the population standard deviation (GRPO as in Shao et al. 2024,
      "DeepSeekMath", arXiv 2402.03300, equation 3, which has no epsilon).

    Equal rewards give exact zeros, and so does a group of one: there is nothing to compare. Raises `DataError` for a
    reward that is not finite and `ConfigError` for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"advantage estimator {estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}."
            f"{near(str(estimator), ESTIMATORS)}"
        )
    r = np.asarray(rewards, dtype=np.float64)
    if r.ndim != 1:
        raise DataError(f"the rewards of a group must be one number a trajectory, got an array of shape {r.shape}")
    if not np.isfinite(r).all():
        raise DataError(f"rewards {r.tolist()} of a group must be finite; repair the environment's reward")
    if r.size == 0 or (r == r[0]).all():  # the mean of equal numbers may differ from them in the last bit
        return np.zeros(r.shape, dtype=np.float32)
    centred = r - r.mean()
    if estimator == "rloo":
        centred *= r.size / (r.size - 1)
    elif estimator == "normalized":
        centred /= r.std() + NORMALIZED_EPSILON
    return np.asarray(centred, dtype=np.float32)


def token_advantages(group: Group, estimator: Estimator = "grpo") -> list[list[FloatArray]]:
    """Return a `float32[T]` for each segment of each trajectory: what every token is trained with.

    A token that the policy sampled (mask True) has the advantage that the environment set for it, and where it set none
    that of its trajectory in the group. Every other token has 0. Raises `DataError` for one that is not finite.
    """
    values = group_advantages(group.scores, estimator)
    return [
        [_segment_advantages(segment, value, group.id) for segment in trajectory.segments]
        for trajectory, value in zip(group.trajectories, values, strict=True)
    ]


def _segment_advantages(segment: Segment, value: np.float32, group: str) -> FloatArray:
    own = segment.advantages
    if own is None:
        return np.where(segment.mask, value, np.float32(0)).astype(np.float32)
    if not np.isfinite(own[segment.mask]).all():
        raise DataError(
            f"group {group}: the environment set a token advantage that is not finite; advantages must be numbers"
        )
    return np.where(segment.mask, own, np.float32(0)).astype(np.float32)
