"""GAE and V-trace against references written from the papers' sums, and truncation against a known value."""

from __future__ import annotations

import numpy as np
import pytest
from tinker_atropos_torch_ppo.advantages import following_values, gae, vtrace

GAMMA, LAM = 0.9, 0.8


def world(seed, steps=9, width=3):
    rng = np.random.default_rng(seed)
    terminated, truncated = rng.random((2, steps, width)) < 0.2
    return {
        "rewards": rng.normal(size=(steps, width)),
        "values": rng.normal(size=(steps + 1, width)),
        "finals": rng.normal(size=int((terminated | truncated).sum())),
        "terminated": terminated,
        "truncated": truncated,
        "ratios": np.exp(rng.normal(0, 0.5, size=(steps, width))),
    }


def value_after(w, t, n):
    """V of what followed step t of simulation n, found by walking through the ends in order."""
    if w["terminated"][t, n]:
        return 0.0
    if w["truncated"][t, n]:
        order = [(i, j) for i in range(len(w["rewards"])) for j in range(w["rewards"].shape[1])
                 if w["terminated"][i, j] or w["truncated"][i, j]]  # fmt: skip
        return w["finals"][order.index((t, n))]
    return w["values"][t + 1, n]


def path_sums(w, ratio_caps):
    """For each step the sum over its own episode of gamma^k * lam^k * (product of c) * rho * TD error, term by term."""
    rho_cap, c_cap = ratio_caps
    steps, width = w["rewards"].shape
    sums = np.zeros((steps, width))
    for s in range(steps):
        for n in range(width):
            weight = 1.0
            for t in range(s, steps):
                error = w["rewards"][t, n] + GAMMA * value_after(w, t, n) - w["values"][t, n]
                sums[s, n] += weight * min(rho_cap, w["ratios"][t, n]) * error
                weight *= GAMMA * LAM * min(c_cap, w["ratios"][t, n])
                if w["terminated"][t, n] or w["truncated"][t, n]:
                    break
    return sums


def arguments(w):
    following = following_values(w["values"], w["finals"], w["terminated"], w["truncated"])
    return {
        "rewards": w["rewards"],
        "values": w["values"][:-1],
        "following": following,
        "ends": w["terminated"] | w["truncated"],
        "gamma": GAMMA,
        "lam": LAM,
    }


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_sum_of_discounted_td_errors_of_the_episode(seed):
    w = world(seed)
    w["ratios"] = np.ones_like(w["ratios"])
    estimate = gae(**arguments(w))
    expected = path_sums(w, (1.0, 1.0))
    np.testing.assert_allclose(estimate.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(estimate.targets, expected + w["values"][:-1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("caps", [(1.0, 1.0), (2.0, 0.7)])
def test_vtrace_targets_and_advantages_are_the_papers_sums(caps):
    w = world(11)
    rewards, ends = w["rewards"], w["terminated"] | w["truncated"]
    estimate = vtrace(**arguments(w), ratios=w["ratios"], rho_bar=caps[0], c_bar=caps[1])
    targets = path_sums(w, caps) + w["values"][:-1]
    np.testing.assert_allclose(estimate.targets, targets, rtol=1e-5, atol=1e-6)
    for t in range(len(rewards)):
        for n in range(rewards.shape[1]):
            later = value_after(w, t, n)
            if t + 1 < len(rewards) and not ends[t, n]:
                later = LAM * targets[t + 1, n] + (1 - LAM) * w["values"][t + 1, n]
            expected = rewards[t, n] + GAMMA * later - w["values"][t, n]
            assert estimate.advantages[t, n] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_vtrace_of_the_newest_policy_is_gae():
    w = world(4)
    plain = gae(**arguments(w))
    corrected = vtrace(**arguments(w), ratios=np.ones_like(w["ratios"]))
    np.testing.assert_array_equal(plain.advantages, corrected.advantages)
    np.testing.assert_array_equal(plain.targets, corrected.targets)


def test_a_truncated_endless_task_is_worth_its_whole_future():
    """Reward 1 for ever is worth 1 / (1 - gamma) = 10 everywhere; cutting it off must not change that."""
    steps, worth = 6, 1 / (1 - GAMMA)
    rewards, values = np.ones((steps, 1)), np.full((steps + 1, 1), worth)
    ended = np.zeros((steps, 1), bool)
    ended[3] = True
    never = np.zeros((steps, 1), bool)
    cut = following_values(values, np.array([worth]), never, ended)
    np.testing.assert_allclose(gae(rewards, values[:-1], cut, ended, GAMMA, LAM).targets, worth, rtol=1e-6)
    # A real end there: the step is worth its own reward, and the ones before it less the further they are from the end.
    over = following_values(values, np.array([worth]), ended, never)
    targets = gae(rewards, values[:-1], over, ended, GAMMA, 1.0).targets[:, 0]
    np.testing.assert_allclose(targets[:4], [3.439, 2.71, 1.9, 1.0], rtol=1e-5)
    np.testing.assert_allclose(targets[4:], worth, rtol=1e-6)


def test_a_step_that_is_both_ended_and_cut_off_is_an_end():
    both = np.ones((1, 1), bool)
    assert following_values(np.ones((2, 1)), np.array([5.0]), both, both) == 0
