"""Bit-equal to Gymnasium: observations, rewards, ends and infos under the same actions, resets included.

`TINKER_ATROPOS_EQUALITY=20x1000` runs 20 seeds of 1,000 steps of each in place of the quick 5 of 120.
"""

from __future__ import annotations

import os
from typing import Any

import gymnasium
import numpy as np
import pytest
from tinker_atropos_humanoid.config import HumanoidConfig, make
from tinker_atropos_humanoid.locomotion import LOCOMOTION_IDS, make_locomotion
from tinker_atropos_humanoid.locomotion.vector_env import AUTORESET

SEEDS, STEPS = (int(number) for number in os.environ.get("TINKER_ATROPOS_EQUALITY", "5x120").split("x"))

HUMANOID: dict[str, Any] = {
    "forward_reward_weight": 2.0,
    "ctrl_cost_weight": 0.3,
    "contact_cost_weight": 1e-5,
    "contact_cost_range": (0.01, 0.5),
    "healthy_reward": 1.7,
    "healthy_z_range": (1.1, 1.9),
    "reset_noise_scale": 0.05,
    "frame_skip": 3,
    "exclude_current_positions_from_observation": False,
    "include_cinert_in_observation": False,
    "include_qfrc_actuator_in_observation": False,
}
ANT: dict[str, Any] = {
    "main_body": "torso",
    "contact_force_range": (-0.3, 0.2),
    "contact_cost_weight": 0.01,
    "healthy_z_range": (0.25, 0.9),
    "forward_reward_weight": 1.3,
    "ctrl_cost_weight": 0.1,
    "reset_noise_scale": 0.2,
    "exclude_current_positions_from_observation": False,
}
HOPPER: dict[str, Any] = {
    "healthy_state_range": (-3.0, 3.0),
    "healthy_z_range": (0.5, 2.0),
    "healthy_angle_range": (-0.6, 0.5),
    "healthy_reward": 0.3,
    "reset_noise_scale": 0.02,
    "exclude_current_positions_from_observation": False,
}
WALKER: dict[str, Any] = {
    "healthy_z_range": (0.6, 2.5),
    "healthy_angle_range": (-0.5, 0.7),
    "ctrl_cost_weight": 0.01,
    "exclude_current_positions_from_observation": False,
}
CHEETAH: dict[str, Any] = {
    "forward_reward_weight": 0.7,
    "ctrl_cost_weight": 0.3,
    "reset_noise_scale": 0.3,
    "frame_skip": 3,
    "exclude_current_positions_from_observation": False,
}
NO_FORCES = {"include_cfrc_ext_in_observation": False, "contact_cost_weight": 0.0}
NO_FALL = {"terminate_when_unhealthy": False}
SHORT = {"max_episode_steps": 25}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((id, {}) for id in LOCOMOTION_IDS),
    ("Humanoid-v5", HUMANOID),
    ("Humanoid-v5", NO_FORCES),
    ("Humanoid-v5", NO_FALL | SHORT | {"include_cvel_in_observation": False}),
    ("Ant-v5", ANT | SHORT),
    ("Ant-v5", NO_FORCES | NO_FALL | {"main_body": 3}),
    ("HalfCheetah-v5", CHEETAH | SHORT),
    ("Hopper-v5", HOPPER),
    ("Hopper-v5", NO_FALL | SHORT | {"frame_skip": 2}),
    ("Walker2d-v5", WALKER),
    ("Walker2d-v5", NO_FALL | SHORT),
]


def assert_same(ours: Any, theirs: Any, where: str) -> None:
    """Equal in type, shape and every bit but the sign of zero."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_same(ours[key], theirs[key], f"{where}: {key}")
    elif theirs.dtype == object:
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None), where
            if other is not None:
                assert_same(one, other, where)
    else:
        assert ours.dtype == theirs.dtype, where
        assert np.array_equal(ours, theirs), where


def actions(env: Any, steps: int, dtype: Any = np.float32) -> Any:
    """From doing nothing in the first simulation to more than the bounds in the last: some fall early, some late."""
    rng = np.random.default_rng(0)
    low, high = env.single_action_space.low, env.single_action_space.high
    scale = np.linspace(0.0, 1.2, env.num_envs)[:, None]
    return (rng.uniform(low, high, (steps, env.num_envs, len(low))) * scale).astype(dtype)


def pair(id: str, autoreset: str, count: int, options: dict[str, Any]) -> tuple[Any, Any]:
    vector = {"autoreset_mode": AUTORESET[autoreset]}
    theirs = gymnasium.make_vec(id, num_envs=count, vectorization_mode="sync", vector_kwargs=vector, **options)
    return make_locomotion(id, num_envs=count, autoreset=autoreset, **options), theirs


@pytest.mark.parametrize("autoreset", ["same_step", "next_step"])
@pytest.mark.parametrize(("id", "options"), CASES)
def test_steps_equal_those_of_gymnasium(id: str, options: dict[str, Any], autoreset: str) -> None:
    ours, theirs = pair(id, autoreset, SEEDS, options)
    assert_same(ours.reset(seed=7)[0], (first := theirs.reset(seed=7))[0], "reset")
    assert_same(ours.reset(seed=8)[1], theirs.reset(seed=8)[1], "reset infos")
    assert first[0].dtype == np.float64
    for place, action in enumerate(actions(theirs, STEPS)):
        for name, one, other in zip(
            ("observation", "reward", "terminated", "truncated", "infos"),
            ours.step(action),
            theirs.step(action),
            strict=True,
        ):
            assert_same(one, other, f"step {place}: {name}")
    assert not ours.faults.any()
    assert ours.single_action_space == theirs.single_action_space
    assert ours.observation_space == theirs.observation_space
    assert ours.metadata["render_fps"] == theirs.metadata["render_fps"]


@pytest.mark.parametrize("id", ["HalfCheetah-v5", "Humanoid-v5"])
def test_actions_count_in_their_own_precision(id: str) -> None:
    ours, theirs = pair(id, "same_step", 2, {})
    ours.reset(seed=0), theirs.reset(seed=0)
    for action in actions(theirs, 30, np.float64):
        for one, other in zip(ours.step(action), theirs.step(action), strict=True):
            assert_same(one, other, "step")


def test_disabled_autoreset_and_reset_masks_equal_gymnasium() -> None:
    ours, theirs = pair("Hopper-v5", "disabled", 4, {})
    ours.reset(seed=[3, 1, 4, 1]), theirs.reset(seed=[3, 1, 4, 1])
    resets = 0
    for action in actions(theirs, 80):
        one, other = ours.step(action), theirs.step(action)
        for mine, his in zip(one, other, strict=True):
            assert_same(mine, his, "step")
        done = other[2] | other[3]
        if done.any():
            resets += 1
            seed = 5 if resets == 1 else None
            assert_same(
                ours.reset(seed=seed, options={"reset_mask": done})[0],
                theirs.reset(seed=seed, options={"reset_mask": done.copy()})[0],
                "masked reset",
            )
    assert resets > 2


def test_it_equals_a_single_environment_of_gymnasium_make() -> None:
    env = make(HumanoidConfig(num_envs=2))
    single = gymnasium.make("Humanoid-v5")
    observations, _ = env.reset(seed=41)
    observation, _ = single.reset(seed=42)
    for action in actions(env, 60):
        assert np.array_equal(observations[1], observation)
        observations, rewards, terminated, _, infos = env.step(action)
        observation, reward, ended, _, info = single.step(action[1])
        assert rewards[1] == reward
        assert terminated[1] == ended
        if ended:
            assert np.array_equal(infos["final_obs"][1], observation)
            assert infos["final_info"]["reward_contact"][1] == info["reward_contact"]
            observation, info = single.reset()
        assert all(np.array_equal(infos[name][1], value) for name, value in info.items())


def test_the_number_of_threads_changes_nothing() -> None:
    one, several = (make_locomotion("Humanoid-v5", num_envs=5, threads=threads) for threads in (1, 3))
    assert (one.simulations.threads, several.simulations.threads) == (1, 3)
    one.reset(seed=0), several.reset(seed=0)
    for action in actions(one, 40):
        for first, second in zip(one.step(action), several.step(action), strict=True):
            assert_same(first, second, "step")


def test_observations_may_be_kept_unless_told_otherwise() -> None:
    kept, reused = (make_locomotion("Hopper-v5", num_envs=2, copy_observations=copy) for copy in (True, False))
    first, again = kept.reset(seed=0)[0], reused.reset(seed=0)[0]
    before = first.copy()
    for action in actions(kept, 3):
        assert np.array_equal(kept.step(action)[0], reused.step(action)[0])
    assert np.array_equal(first, before)
    assert not np.array_equal(again, before)
