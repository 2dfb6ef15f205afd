"""The plugin: what it makes of an id, and what it says where it can't."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tinker_atropos.errors import ConfigError, PluginError
from tinker_atropos.testing import check_environment
from tinker_atropos_gymnasium import environment_spec
from tinker_atropos_gymnasium.config import GymnasiumConfig
from tinker_atropos_gymnasium.environment import make
from tinker_atropos_gymnasium.guard import Guard
from tinker_atropos_gymnasium.registered import missing_extra

fast = pytest.mark.skipif(importlib.util.find_spec("mujoco") is None, reason="needs mujoco")


def made(**settings: Any) -> Any:
    return make(GymnasiumConfig(**settings))


def test_the_plugin_makes_a_vector_environment() -> None:
    spec = environment_spec()
    assert (spec.name, spec.kind, spec.config) == ("gymnasium", "control", GymnasiumConfig)
    env = spec.make(spec.config())
    assert env.num_envs == 16
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert all(field.description for field in GymnasiumConfig.model_fields.values())


@pytest.mark.parametrize(
    ("id", "vectorization"),
    [("CartPole-v1", "sync"), ("CartPole-v1", "async"), ("Pendulum-v1", "sync"), ("FrozenLake-v1", "sync")],
)
def test_steps_equal_those_of_gymnasium(id: str, vectorization: str) -> None:
    env = made(id=id, num_envs=3, vectorization=vectorization, max_episode_steps=20)
    theirs = SyncVectorEnv(
        [lambda: gymnasium.make(id, max_episode_steps=20)] * 3, autoreset_mode=AutoresetMode.SAME_STEP
    )
    assert np.array_equal(env.reset(seed=5)[0], theirs.reset(seed=5)[0])
    theirs.action_space.seed(0)
    ended = 0
    for _ in range(45):
        action = theirs.action_space.sample()
        *ours, infos = env.step(action)
        *expected, their_infos = theirs.step(action)
        assert all(np.array_equal(one, other) for one, other in zip(ours, expected, strict=True))
        assert set(infos) == set(their_infos)
        ended += int((ours[2] | ours[3]).sum())
    assert ended
    assert env.metadata["vectorization"] == vectorization
    env.close()


@fast
def test_the_locomotion_tasks_take_the_fast_path_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        env = made(id="HalfCheetah-v5", num_envs=2, threads=1, make_kwargs={"ctrl_cost_weight": 0.3})
    assert env.metadata["vectorization"] == "fast"
    assert "HalfCheetah-v5: 2 simulations, vectorization fast" in caplog.text
    slow = made(id="HalfCheetah-v5", num_envs=2, vectorization="sync", make_kwargs={"ctrl_cost_weight": 0.3})
    assert slow.metadata["vectorization"] == "sync"
    assert not hasattr(slow, "snapshot")
    assert np.array_equal(env.reset(seed=0)[0], slow.reset(seed=0)[0])
    action = slow.action_space.sample()
    for one, other in zip(env.step(action)[:4], slow.step(action)[:4], strict=True):
        assert np.array_equal(one, other)


@fast
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"id": "CartPole-v1", "vectorization": "fast"}, "env.vectorization: there is a fast path for Ant-v5.*not for"),
        ({"id": "Hopper-v5", "make_kwargs": {"healthy_rewrad": 1}}, "Hopper-v5.healthy_rewrad: unknown key"),
        ({"id": "Hopper-v5", "make_kwargs": {"num_envs": 1}}, "env.make_kwargs: 'num_envs' is no arg.*env.num_envs"),
        ({"id": "Hopper-v5", "vectorization": "fast", "render_mode": "human"}, "no window to render to"),
    ],
)
def test_wrong_wishes_for_the_fast_path_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(**settings)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_frames_of_every_simulation_can_be_had(vectorization: str) -> None:
    pytest.importorskip("pygame")
    env = made(id="CartPole-v1", num_envs=2, vectorization=vectorization, render_mode="rgb_array")
    env.reset(seed=0)
    frames = env.render()
    assert [frame.shape for frame in frames] == [(400, 600, 3)] * 2
    assert len({int(frame.std()) for frame in frames} - {0}) >= 1
    env.close()


@fast
def test_the_fast_path_hands_the_render_mode_on() -> None:
    assert made(id="Hopper-v5", num_envs=1, render_mode="rgb_array").render_mode == "rgb_array"
    assert made(id="Hopper-v5", num_envs=1).render_mode is None


@pytest.mark.parametrize("id", ["CartPole-v1", "Pendulum-v1", "FrozenLake-v1", "HalfCheetah-v5"])
@pytest.mark.parametrize("vectorization", ["sync", None])
def test_it_keeps_the_contract(id: str, vectorization: str | None) -> None:
    if id == "HalfCheetah-v5" and importlib.util.find_spec("mujoco") is None:
        pytest.skip("needs mujoco")
    spec = environment_spec()
    settings = {"id": id, "vectorization": vectorization}
    check_environment(replace(spec, make=lambda config: make(config.model_copy(update=settings))))


class OneSimulation(gymnasium.Env[Any, Any]):
    """A vector environment of one, with all that the plugin lays around it, seen as a plain environment."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, id: str) -> None:
        self.vector: Any = made(id=id, num_envs=1, autoreset="disabled")
        self.observation_space = self.vector.single_observation_space
        self.action_space = self.vector.single_action_space
        self.spec = gymnasium.spec(id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)  # the checker looks at the base class's generator
        observations, infos = self.vector.reset(seed=seed, options=options)
        return observations[0], infos

    def step(self, action: Any) -> Any:
        observations, rewards, terminated, truncated, infos = self.vector.step(np.asarray(action)[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos


@pytest.mark.parametrize("id", ["CartPole-v1", "MountainCarContinuous-v0"])
def test_gymnasiums_own_checker_passes_what_the_guard_hands_on(id: str) -> None:
    env = OneSimulation(id)
    assert isinstance(env.vector, Guard)
    check_env(env, skip_render_check=True)


@pytest.mark.parametrize(
    ("id", "said"),
    [
        ("CartPol-v1", "'CartPol-v1' is no registered.*Did you mean 'CartPole-v1'"),
        ("cartpole-v1", "Did you mean 'CartPole-v1'"),
        ("CartPole-v7", "There is CartPole-v0, CartPole-v1"),
        ("ALE/Pong-v5", r"gymnasium\[atari\].*env.id=ale_py:ALE/Pong-v5"),
        ("no_such_module:Thing-v0", "module 'no_such_module' can't be imported"),
        ("::", "no registered|can't be imported"),
    ],
)
def test_an_unknown_id_is_answered_with_a_near_one(id: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(id=id)


@pytest.mark.parametrize(
    ("entry", "extra"),
    [("gymnasium.envs.box2d.lunar_lander:LunarLander", "box2d"), ("gymnasium.envs.mujoco.ant_v5:AntEnv", "mujoco")],
)
def test_a_missing_extra_is_answered_with_the_pip_command(entry: str, extra: str) -> None:
    spec = gymnasium.envs.registration.EnvSpec("Thing-v0", entry_point=entry)
    error = missing_extra(spec, ModuleNotFoundError("No module named 'thing'"))
    assert f'`pip install "gymnasium[{extra}]"`' in str(error)


@pytest.mark.skipif(importlib.util.find_spec("Box2D") is not None, reason="box2d is installed")
def test_box2d_is_named_where_it_is_missing() -> None:
    with pytest.raises(PluginError, match=r"LunarLander-v3 needs.*gymnasium\[box2d\]"):
        made(id="LunarLander-v3")


def test_a_wrong_keyword_argument_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"CartPole-v1 does not take {'gravitas': 1}"):
        made(id="CartPole-v1", make_kwargs={"gravitas": 1})


def test_threads_without_a_fast_path_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"env.threads: 2 has no effect with vectorization sync"):
        made(id="CartPole-v1", threads=2)


def test_a_space_that_no_trainer_takes_is_refused() -> None:
    with pytest.raises(PluginError, match="Blackjack-v1 has the observation space Tuple"):
        made(id="Blackjack-v1")


def test_an_environment_of_another_module_can_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "my_tasks.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=3)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        env = made(id="my_tasks:Mine-v0", num_envs=2)
        env.reset(seed=0)
        truncated = [env.step(np.zeros(2, np.int64))[3].all() for _ in range(3)]
        assert truncated == [False, False, True]
        assert isinstance(env.single_action_space, spaces.Discrete)
    finally:
        gymnasium.registry.pop("Mine-v0", None)
