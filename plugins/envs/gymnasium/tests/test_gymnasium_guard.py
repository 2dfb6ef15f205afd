"""NaN and wrong actions in Gymnasium's own vector environments: named, contained, counted."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tinker_atropos.errors import RunError
from tinker_atropos_gymnasium.config import GymnasiumConfig
from tinker_atropos_gymnasium.environment import make
from tinker_atropos_gymnasium.guard import Guard


class Counter(gymnasium.Env[Any, Any]):
    """Observes how many steps were taken; a NaN where the action says so, in the observation or the reward."""

    observation_space = spaces.Box(-np.inf, np.inf, (1,), np.float64)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": []}  # noqa: RUF012

    def reset(self, **given: Any) -> Any:
        self.count = 0.0
        return np.zeros(1), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        seen = np.nan if action[0] == 1.0 else self.count
        return np.array([seen]), np.nan if action[0] == -1.0 else 1.0, False, False, {}


def started(mode: AutoresetMode = AutoresetMode.SAME_STEP) -> Guard:
    env = Guard(SyncVectorEnv([Counter] * 3, autoreset_mode=mode), "Counter-v0")
    env.reset(seed=0)
    return env


def act(*values: float) -> Any:
    return np.array(values, np.float32)[:, None]


@pytest.mark.parametrize(("value", "what"), [(np.nan, "action"), (1.0, "observation"), (-1.0, "reward")])
def test_a_nan_resets_that_simulation_only(value: float, what: str, caplog: pytest.LogCaptureFixture) -> None:
    env = started()
    env.step(act(0, 0, 0))
    with caplog.at_level(logging.WARNING):
        observations, rewards, terminated, truncated, infos = env.step(act(0, value, 0))
    assert f"Counter-v0, simulation 1, step 2: the {what} is not finite" in caplog.text
    assert truncated.tolist() == [False, True, False]
    assert rewards.tolist() == [1, 0, 1]
    assert not terminated.any()
    assert observations[:, 0].tolist() == [2, 0, 2]
    assert infos["final_obs"][1].tolist() == [1]
    assert infos["fault"].tolist() == [False, True, False]
    observations, _, _, truncated, infos = env.step(act(0, 0, 0))
    assert observations[:, 0].tolist() == [3, 1, 3]
    assert not truncated.any()
    assert "fault" not in infos
    assert env.faults.tolist() == [0, 1, 0]


def test_next_step_autoreset_resets_in_the_step_after() -> None:
    env = started(AutoresetMode.NEXT_STEP)
    env.step(act(0, 0, 0))
    observations, _, _, truncated, _ = env.step(act(0, 0, 1))
    assert observations[:, 0].tolist() == [2, 2, 1]
    assert truncated.tolist() == [False, False, True]
    observations, rewards, _, truncated, _ = env.step(act(0, 0, np.nan))  # that action is not used
    assert observations[:, 0].tolist() == [3, 3, 0]
    assert rewards.tolist() == [1, 1, 0]
    assert not truncated.any()
    observations, *_ = env.step(act(0, 0, 0))
    assert observations[:, 0].tolist() == [4, 4, 1]
    assert env.faults.tolist() == [0, 0, 1]


def test_without_autoreset_the_caller_resets() -> None:
    env = started(AutoresetMode.DISABLED)
    *_, truncated, _ = env.step(act(1, 0, 0))
    observations, _ = env.reset(options={"reset_mask": truncated})
    assert observations[:, 0].tolist() == [0, 1, 1]
    assert env.step(act(0, 0, 0))[0][:, 0].tolist() == [1, 2, 2]


def test_many_faults_are_counted_and_not_all_logged(caplog: pytest.LogCaptureFixture) -> None:
    env = started()
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            env.step(act(1, 0, 0))
    assert env.faults.tolist() == [20, 0, 0]
    assert [text.rpartition("fault ")[2] for text in caplog.messages] == [*(f"{n})" for n in range(1, 9)), "16)"]


def test_worker_processes_contain_a_nan_as_well() -> None:
    env = make(GymnasiumConfig(id="Pendulum-v1", num_envs=2, vectorization="async"))
    env.reset(seed=0)
    observations, _, _, truncated, infos = env.step(np.array([[0.0], [np.nan]], np.float32))
    assert truncated.tolist() == [False, True]
    assert np.isfinite(observations).all()
    assert infos["fault"].tolist() == [False, True]
    env.close()


@pytest.mark.parametrize(
    ("actions", "said"),
    [
        (np.zeros(2, np.int64), r"shape \(2,\).*need \(3,\)"),
        (np.zeros(3, np.float32), "float32.*needs integers"),
        (np.array([0, 1, 2]), r"simulation 2, step 1: the action 2 is not within the action space Discrete\(2\)"),
        (np.array([0, -1, 0]), "simulation 1, step 1: the action -1"),
    ],
)
def test_wrong_discrete_actions_are_refused(actions: Any, said: str) -> None:
    env = make(GymnasiumConfig(num_envs=3))
    env.reset(seed=0)
    with pytest.raises(RunError, match=said):
        env.step(actions)


def test_a_step_before_the_reset_is_refused() -> None:
    with pytest.raises(RunError, match=r"call reset\(\) before"):
        make(GymnasiumConfig(num_envs=1)).step(np.zeros(1, np.int64))
