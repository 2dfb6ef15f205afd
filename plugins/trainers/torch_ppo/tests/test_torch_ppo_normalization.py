"""Statistics merged piece by piece equal those of one pass."""

from __future__ import annotations

import numpy as np
from tinker_atropos_torch_ppo.normalization import Moments, RewardScale


def test_merged_moments_are_those_of_one_pass():
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(1000, 4)) * [1, 10, 1e-3, 0] + [0, 1e4, 5, 7]).astype(np.float32)
    moments = Moments.zero(4)
    for piece in np.split(rows, [1, 2, 300, 300, 950]):
        moments.merge(piece)
    exact = rows.astype(np.float64)
    assert moments.count == 1000
    np.testing.assert_allclose(moments.mean, exact.mean(0), rtol=1e-12)
    np.testing.assert_allclose(moments.variance, exact.var(0), rtol=1e-9, atol=1e-15)


def test_moments_of_nothing_change_nothing():
    np.testing.assert_allclose(Moments.zero(2).scale(), 1.0, rtol=1e-7)


def reference_returns(rewards, ends, gamma):
    returns = []
    for n in range(rewards.shape[1]):
        running = 0.0
        for t in range(len(rewards)):
            running = running * gamma + rewards[t, n]
            returns.append(running)
            if ends[t, n]:
                running = 0.0
    return np.array(returns)


def test_the_reward_scale_goes_on_across_fragments():
    rng = np.random.default_rng(1)
    rewards, ends = rng.normal(2, 1, (60, 3)), rng.random((60, 3)) < 0.05
    scale = RewardScale(gamma=0.97)
    for piece in (slice(0, 20), slice(20, 21), slice(21, 60)):
        scale.merge(0, rewards[piece], ends[piece])
    deviation = reference_returns(rewards, ends, 0.97).std()
    np.testing.assert_allclose(scale.apply(rewards), rewards / deviation, rtol=1e-7)


def test_a_fresh_episode_begins_its_return_anew():
    scale = RewardScale(gamma=0.9)
    scale.merge(0, np.ones((5, 2)), np.zeros((5, 2), bool))
    before = scale.carried[0].copy()
    scale.merge(0, np.ones((1, 2)), np.zeros((1, 2), bool), fresh=np.array([True, False]))
    np.testing.assert_allclose(scale.carried[0], [1.0, 1.0 + 0.9 * before[1]])


def test_scaled_rewards_keep_their_sign_and_stay_within_bounds():
    scale = RewardScale(gamma=0.9)
    scale.merge(0, np.array([[1.0, 2.0], [1.0, 2.0]]), np.zeros((2, 2), bool))
    assert (np.sign(scale.apply(np.array([-1e9, 0.0, 1e9]))) == [-1, 0, 1]).all()
    assert np.abs(scale.apply(np.array([-1e9, 1e9]))).max() == 10


def test_another_number_of_simulations_begins_new_returns():
    scale = RewardScale(gamma=0.9)
    scale.merge(0, np.ones((5, 2)), np.zeros((5, 2), bool))
    scale.merge(0, np.ones((1, 3)), np.zeros((1, 3), bool))
    np.testing.assert_array_equal(scale.carried[0], [1.0, 1.0, 1.0])
