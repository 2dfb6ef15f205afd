"""Advantages and value targets of control: GAE, and V-trace for steps of an older policy. Pure NumPy functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker_atropos.trajectory import BoolArray, FloatArray

Array = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Estimate:
    """What a fragment's steps are learned from, each `float32[T, N]`.

    `advantages` weigh the policy's gradient, `targets` are what the critic learns.
    """

    advantages: FloatArray
    targets: FloatArray


def following_values(values: Array, finals: Array, terminated: BoolArray, truncated: BoolArray) -> NDArray[np.float64]:
    """Return `float64[T, N]`, the value of what really followed each step.

    From `values [T + 1, N]` of the fragment's observations and `finals [K]` of the last ones of its episodes, in the
    order of `np.argwhere(terminated | truncated)`. A termination is worth 0. An episode that was only cut off is worth
    its last observation's value, not that of the next episode's first (Pardo et al. 2018, "Time Limits in Reinforcement
    Learning", arXiv 1712.00378). A step that is both is a termination.
    """
    following = np.array(values[1:], dtype=np.float64)
    following[terminated | truncated] = finals
    following[terminated] = 0.0
    return following


def gae(rewards: Array, values: Array, following: Array, ends: BoolArray, gamma: float, lam: float) -> Estimate:
    """Return generalised advantage estimates (Schulman et al. 2016, arXiv 1506.02438, equation 16), in float64.

    All are `[T, N]`: `values` V(s_t), `following` V(s_{t+1}) as `following_values` gives it, `ends` where an episode
    ended. With `d_t = r_t + gamma * V(s_{t+1}) - V(s_t)`:

        A_t = d_t + gamma * lam * A_{t+1}, where the episode goes on;    target_t = A_t + V(s_t)
    """
    deltas = rewards + gamma * np.asarray(following, dtype=np.float64) - np.asarray(values, dtype=np.float64)
    advantages = _discounted(deltas, gamma * lam * ~ends)
    return _estimate(advantages, advantages + values)


def vtrace(
    rewards: Array,
    values: Array,
    following: Array,
    ends: BoolArray,
    ratios: Array,
    gamma: float,
    lam: float,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> Estimate:
    """Return V-trace targets and advantages (Espeholt et al. 2018, "IMPALA", arXiv 1802.01561, equations 1 and 4).

    `ratios [T, N]` is pi(a|s) of the policy that learns over that of the one that acted; the rest as in `gae`. With
    `rho_t = min(rho_bar, ratio_t)`, `c_t = lam * min(c_bar, ratio_t)` and `d_t = rho_t * (r_t + gamma * V(s_{t+1}) -
    V(s_t))`:

        target_t = V(s_t) + d_t + gamma * c_t * (target_{t+1} - V(s_{t+1})), where the episode goes on
        A_t = r_t + gamma * (V(s_{t+1}) + lam * (target_{t+1} - V(s_{t+1}))) - V(s_t)

    The paper's policy gradient is `rho_t * A_t`, with lam 1 in A. With lam in it too, both are exactly `gae` where all
    ratios are 1. PPO's own ratio to the policy that acted takes the place of `rho_t` in front of A (as in Sample
    Factory; a ratio to the policy before the update, weighted by `rho_t`, learned CartPole half as fast).
    """
    errors = rewards + gamma * np.asarray(following, dtype=np.float64) - values
    rho = np.minimum(rho_bar, ratios)
    corrections = _discounted(rho * errors, gamma * lam * np.minimum(c_bar, ratios) * ~ends)
    later = np.concatenate([corrections[1:], np.zeros_like(corrections[:1])])
    return _estimate(errors + gamma * lam * ~ends * later, corrections + values)


def _discounted(terms: Array, discounts: Array) -> NDArray[np.float64]:
    """Return `x_t = terms_t + discounts_t * x_{t+1}`, along the first axis from its end."""
    sums = np.empty(terms.shape, dtype=np.float64)
    later: NDArray[Any] = np.zeros(terms.shape[1:], dtype=np.float64)
    for t in reversed(range(len(terms))):
        later = terms[t] + discounts[t] * later
        sums[t] = later
    return sums


def _estimate(advantages: Array, targets: Array) -> Estimate:
    return Estimate(np.asarray(advantages, dtype=np.float32), np.asarray(targets, dtype=np.float32))
