"""Running statistics of observations and returns. Merged by the learner only; a policy carries a frozen copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

OBSERVATION_CLIP = 10.0
"""Largest normalised observation, in standard deviations."""

REWARD_CLIP = 10.0
"""Largest scaled reward."""

EPSILON = 1e-8
"""Added to a variance before its root is taken."""

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Moments:
    """Count, mean and variance (population) of all rows merged so far, `float64[D]`."""

    mean: Floats
    variance: Floats
    count: int = 0

    @staticmethod
    def zero(width: int) -> Moments:
        """Return the moments of nothing: mean 0 and variance 1, which the first rows replace."""
        return Moments(np.zeros(width), np.ones(width))

    def merge(self, rows: NDArray[Any]) -> None:
        """Add `rows [M, D]`; as exact as one pass over all rows (Chan, Golub and LeVeque 1979, equation 2.1)."""
        more = len(rows)
        if more == 0:
            return
        mean, variance = rows.mean(axis=0, dtype=np.float64), rows.var(axis=0, dtype=np.float64)
        total = self.count + more
        delta = mean - self.mean
        squares = self.variance * self.count + variance * more + delta**2 * (self.count * more / total)
        self.mean = self.mean + delta * (more / total)
        self.variance = squares / total
        self.count = total

    def scale(self) -> Floats:
        """Return `1 / standard deviation`."""
        return np.asarray(1.0 / np.sqrt(self.variance + EPSILON), dtype=np.float64)


@dataclass(slots=True)
class RewardScale:
    """Scales rewards by the running deviation of the discounted returns, as Gymnasium's `NormalizeReward` does.

    The return of a simulation so far, `G = gamma * G + r`, goes on across the fragments of its shard and begins anew
    where an episode ended. `carried[shard]` holds them, `float64[N]`.
    """

    gamma: float
    moments: Moments = field(default_factory=lambda: Moments.zero(1))
    carried: list[Floats] = field(default_factory=list)

    def merge(
        self, shard: int, rewards: NDArray[Any], ends: NDArray[np.bool_], fresh: NDArray[np.bool_] | None = None
    ) -> None:
        """Add the returns of a shard's next fragment, from raw `rewards [T, N]` and where its episodes ended `[T, N]`.

        `fresh bool[N]`: where an episode begins with its first step, whatever the fragment before ended with.
        """
        while len(self.carried) <= shard:
            self.carried.append(np.zeros(0))
        running = self.carried[shard]
        if running.shape != rewards.shape[1:]:
            running = np.zeros(rewards.shape[1:])
        if fresh is not None:
            running = np.where(fresh, 0.0, running)
        returns = np.empty(rewards.shape, dtype=np.float64)
        for t in range(len(rewards)):
            running = running * self.gamma + rewards[t]
            returns[t] = running
            running = np.where(ends[t], 0.0, running)
        self.carried[shard] = running
        self.moments.merge(returns.reshape(-1, 1))

    def apply(self, rewards: NDArray[Any]) -> Floats:
        """Return the scaled rewards, within ±10. Their mean stays where it is: what is good and bad must not change."""
        return np.asarray(np.clip(rewards * self.moments.scale()[0], -REWARD_CLIP, REWARD_CLIP), dtype=np.float64)
