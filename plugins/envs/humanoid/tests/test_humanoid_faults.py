"""NaN, instability and wrong shapes: named, contained, counted."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from tinker_atropos.errors import RunError
from tinker_atropos_humanoid.locomotion import make_locomotion


def started(**settings: Any) -> Any:
    env = make_locomotion(settings.pop("id", "Humanoid-v5"), num_envs=3, **settings)
    env.reset(seed=0)
    return env


def none(env: Any) -> Any:
    return np.zeros(env.action_space.shape, np.float32)


def test_a_nan_action_resets_that_simulation_only(caplog: pytest.LogCaptureFixture) -> None:
    env, undisturbed = started(), started()
    before = env.step(none(env))[0]
    undisturbed.step(none(env))
    wrong = none(env)
    wrong[1, 4] = np.nan
    with caplog.at_level(logging.WARNING):
        observations, rewards, terminated, truncated, infos = env.step(wrong)
    expected = undisturbed.step(none(env))
    assert "Humanoid-v5, simulation 1, step 2: action[4] is nan; it was reset (fault 1)" in caplog.text
    assert (truncated.tolist(), terminated.any(), rewards[1]) == ([False, True, False], False, 0.0)
    assert np.array_equal(infos["final_obs"][1], before[1])
    assert infos["fault"].tolist() == [False, True, False]
    assert infos["_reward_forward"].tolist() == [True, False, True]
    assert not infos["final_info"]
    assert np.isfinite(observations).all()
    assert observations[1, 0] == pytest.approx(1.4, abs=0.02)  # at the start again
    for row in (0, 2):
        assert np.array_equal(observations[row], expected[0][row])
        assert rewards[row] == expected[1][row]
    assert env.faults.tolist() == [0, 1, 0]


def test_next_step_autoreset_resets_in_the_step_after() -> None:
    env = started(autoreset="next_step")
    before = env.step(none(env))[0]
    wrong = none(env)
    wrong[2] = np.inf
    observations, _, _, truncated, infos = env.step(wrong)
    assert truncated.tolist() == [False, False, True]
    assert np.array_equal(observations[2], before[2])
    assert infos["_x_position"].tolist() == [True, True, False]
    observations, rewards, _, truncated, infos = env.step(wrong)  # that action is not used, so it is no fault
    assert not truncated.any()
    assert rewards[2] == 0
    assert "fault" not in infos
    assert env.faults.sum() == 1


@pytest.mark.parametrize("id", ["Humanoid-v5", "HalfCheetah-v5"])
def test_unstable_physics_reset_that_simulation(id: str, caplog: pytest.LogCaptureFixture) -> None:
    env = started(id=id)
    env.simulations.qvel[0] = 1e12
    _, rewards, terminated, truncated, infos = env.step(none(env))
    assert "simulation 0, step 1: the physics became unstable" in caplog.text
    assert (truncated.tolist(), terminated.any(), rewards[0]) == ([True, False, False], False, 0.0)
    assert infos["fault"].tolist() == [True, False, False]
    for _ in range(5):  # and it is well again
        observations, _, _, _, infos = env.step(none(env))
        assert "fault" not in infos
        assert np.isfinite(observations).all()
    assert env.faults.tolist() == [1, 0, 0]


def test_a_nan_in_the_state_is_found_in_the_step_that_sees_it() -> None:
    env = started()
    env.simulations.qpos[1, 7] = np.nan
    *_, truncated, _ = env.step(none(env))
    assert truncated.tolist() == [False, True, False]


def test_a_nan_reward_is_no_reward(caplog: pytest.LogCaptureFixture) -> None:
    env = started(id="HalfCheetah-v5")  # its position is not observed
    env.step(none(env))
    env._positions[2] = np.nan
    _, rewards, _, truncated, _ = env.step(none(env))
    assert "simulation 2, step 2: reward[0] is nan" in caplog.text
    assert rewards[2] == 0
    assert truncated.tolist() == [False, False, True]


def test_many_faults_are_counted_and_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = started()
    wrong = np.full_like(none(env), np.nan)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            env.step(wrong)
    assert env.faults.tolist() == [10, 10, 10]
    assert [text.rpartition("fault ")[2] for text in caplog.messages] == [*(f"{n})" for n in range(1, 9)), "16)"]


@pytest.mark.parametrize("shape", [(17,), (3, 16), (2, 17), (3, 17, 1)])
def test_actions_of_a_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    env = started()
    with pytest.raises(RunError, match=r"need \(3, 17\)"):
        env.step(np.zeros(shape, np.float32))


def test_steps_out_of_order_are_refused() -> None:
    env = make_locomotion("Hopper-v5", num_envs=2, autoreset="disabled", max_episode_steps=1)
    with pytest.raises(RunError, match="call reset"):
        env.step(none(env))
    env.reset(seed=0)
    env.step(none(env))
    with pytest.raises(RunError, match=r"simulations \[0, 1\] have ended"):
        env.step(none(env))


@pytest.mark.parametrize("mask", [[True, False, False], np.zeros(3, np.bool_), np.ones(2, np.bool_), np.ones(3)])
def test_a_wrong_reset_mask_is_refused(mask: Any) -> None:
    with pytest.raises(RunError, match=r"expected a bool array of shape \(3,\)"):
        started().reset(options={"reset_mask": mask})


def test_seeds_of_a_wrong_number_are_refused() -> None:
    with pytest.raises(RunError, match="2 numbers for 3 simulations"):
        started().reset(seed=[1, 2])
