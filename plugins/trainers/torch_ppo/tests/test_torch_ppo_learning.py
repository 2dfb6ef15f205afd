"""Learning: CartPole to 450 by steps, in both schedules, and a Gaussian policy towards a known best action."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker_atropos.control import ControlBatch, ControlSpaces, Fragment
from tinker_atropos.trajectory import PolicyRef
from tinker_atropos_torch_ppo.config import TorchPPOConfig
from tinker_atropos_torch_ppo.inference import NumpyPolicy
from tinker_atropos_torch_ppo.ppo import Learner
from tinker_atropos_torch_ppo.spaces import read_spaces


def policy_of(learner: Learner) -> NumpyPolicy:
    return NumpyPolicy(PolicyRef("run", 0, learner.step, "memory://run"), learner.snapshot())


@pytest.mark.parametrize("lag", [0, 1])
def test_cartpole_reaches_450(small_collector, lag):
    """With `lag` 1 every fragment is of the policy before the newest, as in the async schedule."""
    gymnasium = pytest.importorskip("gymnasium")
    same_step = {"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP}
    environment = gymnasium.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync", vector_kwargs=same_step)
    spaces = ControlSpaces(environment.single_observation_space, environment.single_action_space, "CartPole-v1")
    config = TorchPPOConfig(
        learning_rate=1e-3, minibatches=8, steps_per_update=128, schedule="async" if lag else "sync",
        total_env_steps=60_000, device="cpu",
    )  # fmt: skip
    torch.set_num_threads(1)
    learner = Learner(read_spaces(spaces), config, 1, torch.device("cpu"))
    collector = small_collector(environment, seed=1)
    policies = [policy_of(learner)] * (1 + lag)
    returns: list[float] = []
    while learner.env_steps < 60_000 and np.mean([0.0, *returns[-20:]]) < 450:
        fragment = collector.collect(policies.pop(0), config.steps_per_update)
        learner.update(ControlBatch(learner.step, (fragment,)))
        policies.append(policy_of(learner))
        returns += [episode[0] for episode in fragment.episodes]
    environment.close()
    assert np.mean(returns[-20:]) >= 450


def test_a_gaussian_policy_finds_the_best_action(continuous_spaces, any_ref):
    """The reward is minus the squared distance to a target; the observation says its sign."""
    config = TorchPPOConfig(learning_rate=3e-3, minibatches=4, log_std_init=-0.5, device="cpu", gamma=0.5)
    learner = Learner(read_spaces(continuous_spaces), config, 0, torch.device("cpu"))
    rng = np.random.default_rng(0)
    none = np.zeros((32, 8), bool)
    for _ in range(25):
        signs = rng.choice([-1.0, 1.0], (33, 8, 1)).astype(np.float32)
        observations = np.repeat(signs, 5, axis=2)
        acted = [policy_of(learner).act(row, rng) for row in observations[:-1]]
        actions = np.stack([one.actions for one in acted])
        rewards = -((actions - 0.3 * signs[:-1]) ** 2).sum(-1).astype(np.float32)
        fragment = Fragment(
            "f", observations, actions, np.stack([one.logprobs for one in acted]), rewards, none, none,
            np.zeros((0, 5), np.float32), any_ref,
        )  # fmt: skip
        metrics = learner.update(ControlBatch(learner.step, (fragment,)))
    mode = policy_of(learner).act(np.array([[1.0] * 5, [-1.0] * 5], np.float32), None).actions
    np.testing.assert_allclose(mode, [[0.3] * 3, [-0.3] * 3], atol=0.1)
    assert metrics["policy/std"] < 0.5
