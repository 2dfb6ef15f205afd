"""The plugin: its configuration, what it makes, Gymnasium's own checker, and frames."""

from __future__ import annotations

import importlib.util
import inspect
import json
import warnings
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from tinker_atropos import TrainerConfig, TrainerSpec
from tinker_atropos.config import load, validate
from tinker_atropos.errors import ConfigError, PluginError, RunError
from tinker_atropos.registry import Registry
from tinker_atropos.testing import check_environment
from tinker_atropos_humanoid import environment_spec
from tinker_atropos_humanoid.config import HumanoidConfig, make
from tinker_atropos_humanoid.locomotion import LOCOMOTION_IDS, make_locomotion
from tinker_atropos_humanoid.locomotion.tasks import TASKS


class OneSimulation(gymnasium.Env[Any, Any]):
    """A vector environment of one, seen as a plain environment."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, vector: Any) -> None:
        self.vector = vector
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self.spec = gymnasium.spec(vector.task.id)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)  # the checker looks at the base class's generator
        observations, infos = self.vector.reset(seed=seed, options=options)
        return observations[0], infos

    def step(self, action: Any) -> Any:
        observations, rewards, terminated, truncated, infos = self.vector.step(action[None])
        return observations[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), infos


@pytest.mark.parametrize("id", LOCOMOTION_IDS)
def test_gymnasiums_own_checker_passes(id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*Box observation space m.*imum value is .*infinity")
        check_env(OneSimulation(make_locomotion(id, num_envs=1, autoreset="disabled")), skip_render_check=True)


def test_without_a_file_torch_ppo_is_configured_as_in_configs_humanoid() -> None:
    pytest.importorskip("tinker_atropos_torch_ppo")
    root = Path(__file__).parents[4]
    named = [("run.env", "humanoid", "--env"), ("run.trainer", "torch_ppo", "--trainer")]
    length = ("trainer.total_env_steps", 1_000_000, "--env-steps")
    plain, tuned = load(None, [*named, length]), load(root / "configs" / "humanoid.yaml")
    assert plain.trainer == tuned.trainer
    assert plain.environment == tuned.environment
    assert plain.origins["torch_ppo.epochs"] == "suits humanoid"
    assert "torch_ppo.log_std_init" not in plain.unused
    mine = load(None, [*named, length, ("torch_ppo.epochs", 10, "--set")])
    assert (mine.trainer.epochs, mine.trainer.minibatches) == (10, 8)


def test_its_settings_of_torch_ppo_harm_no_other_trainer() -> None:
    class OtherConfig(TrainerConfig):
        steps_per_update: int = 8
        schedule: Literal["sync", "async"] = "sync"
        total_env_steps: int | None = None

    def nothing(*_: Any) -> Any:
        raise NotImplementedError

    registry = Registry(points=[])
    registry.add("env", environment_spec())
    registry.add("trainer", TrainerSpec("other", nothing, nothing, kinds=frozenset({"control"}), config=OtherConfig))
    given = {"run.env": "humanoid", "run.trainer": "other", "env.total_steps": 3}
    config = load(None, [(path, value, path) for path, value in given.items()], registry=registry)
    assert config.trainer == OtherConfig(total_env_steps=3 * 8 * 16)


def test_it_keeps_the_contract() -> None:
    check_environment(environment_spec())


def test_the_plugin_makes_a_vector_environment() -> None:
    spec = environment_spec()
    assert (spec.name, spec.kind, spec.config) == ("humanoid", "control", HumanoidConfig)
    env = spec.make(spec.config())
    assert env.num_envs == 16
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.observation_space.shape == (16, 348)
    assert env.action_space.shape == (16, 17)
    assert env.action_space.contains(env.action_space.sample())
    assert env.spec.id == "Humanoid-v5"


@pytest.mark.parametrize("id", LOCOMOTION_IDS)
def test_options_and_defaults_are_gymnasiums(id: str) -> None:
    """The class's own arguments, and those it hands on to MujocoEnv."""
    entry = gymnasium.spec(id).entry_point
    assert isinstance(entry, str)
    theirs: dict[str, Any] = {}
    for owner in ("gymnasium.envs.mujoco.mujoco_env:MujocoEnv", entry):
        theirs |= inspect.signature(gymnasium.envs.registration.load_env_creator(owner).__init__).parameters  # type: ignore[misc]
    for name in ("self", "kwargs", "model_path", "observation_space"):
        del theirs[name]
    camera = theirs.pop("default_camera_config").default
    ours = {name: field.default for name, field in TASKS[id].options.model_fields.items()}
    assert ours.pop("default_camera_config") is None
    assert ours == {name: parameter.default for name, parameter in theirs.items()}
    assert {key: list(np.atleast_1d(value)) for key, value in TASKS[id].camera.items()} == {
        key: list(np.atleast_1d(value)) for key, value in camera.items()
    }
    assert all(field.description for field in TASKS[id].options.model_fields.values())


def test_a_configuration_survives_a_file() -> None:
    config = HumanoidConfig(contact_cost_range=(-float("inf"), 3.0))
    assert HumanoidConfig(**config.model_dump(mode="json")) == config
    assert HumanoidConfig(**json.loads(config.model_dump_json())) == config
    assert validate(HumanoidConfig, config.model_dump(mode="json"), path="humanoid") == config


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"helthy_reward": 1.0}, "helthy_reward.*unknown key.*healthy_reward"),
        ({"num_envs": 0}, "num_envs"),
        ({"healthy_z_range": 1.0}, "healthy_z_range"),
        ({"healthy_z_range": [float("nan"), 2.0]}, "healthy_z_range.0: got nan"),
        ({"healthy_reward": float("inf")}, "healthy_reward.*finite"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        validate(HumanoidConfig, settings, path="env")


@pytest.mark.parametrize(
    ("missing", "said"),
    [("mujoco", "it is not installed"), ("mujoco.batch", r"4\.\S+ is installed, which has no mujoco\.batch")],
)
def test_without_mujoco_4_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch, missing: str, said: str) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else known(name))
    for made in (lambda: make(HumanoidConfig(num_envs=1)), lambda: make_locomotion("Hopper-v5", num_envs=1)):
        with pytest.raises(PluginError, match=rf"MuJoCo 4 or newer, and {said}; `pip install 'mujoco>=4' 'gymnasium"):
            made()


def test_a_wrong_model_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'humanoids.xml' can't be loaded"):
        make(HumanoidConfig(xml_file="humanoids.xml"))


def test_an_unknown_body_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"no body 'torsi'. Did you mean 'torso'"):
        make_locomotion("Ant-v5", main_body="torsi")


def test_an_id_without_a_fast_path_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no fast path for 'Hoper-v5'.* Did you mean 'Hopper-v5'"):
        make_locomotion("Hoper-v5")


def test_a_frame_shows_the_simulation_that_was_asked_for() -> None:
    env = make(HumanoidConfig(num_envs=2, width=64, height=48, render_mode="rgb_array"))
    env.reset(seed=0)
    try:
        frames = env.render()
    except RunError as error:
        pytest.skip(f"no OpenGL here: {error}")
    assert frames is not None
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 2
    rng = np.random.default_rng(0)
    for _ in range(12):
        env.step(rng.uniform(-0.4, 0.4, (2, 17)))
    assert not np.array_equal(env.render_simulation(0), env.render_simulation(1))
    env.close()


@pytest.mark.parametrize("id", LOCOMOTION_IDS)
def test_the_camera_goes_along_unless_another_was_chosen(id: str) -> None:
    def body(**settings: Any) -> int:
        """How many pixels are brown, as all bodies are, when one has walked 50 m."""
        env: Any = make_locomotion(id, num_envs=1, width=128, height=128, **settings)
        env.reset(seed=0)
        try:
            env.render_simulation(0)
            env.simulations.qpos[0, 0] += 50
            env.step(np.zeros(env.action_space.shape, np.float32))
            red, _, blue = np.moveaxis(env.render_simulation(0).astype(int), 2, 0)
        except RunError as error:
            pytest.skip(f"no OpenGL here: {error}")
        return int((red - blue > 40).sum())

    assert body() > 50
    assert body(default_camera_config={"distance": 4.0}) == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Gymnasium's viewer, in its __del__
def test_rendering_without_opengl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "no-such-library")
    env = make(HumanoidConfig(num_envs=1))
    env.reset(seed=0)
    with pytest.raises(RunError, match="set MUJOCO_GL=egl"):
        env.render_simulation(0)


@pytest.mark.parametrize(("index", "mode"), [(2, "rgb_array"), (-1, "rgb_array"), (0, "human")])
def test_wrong_wishes_for_a_frame_are_refused(index: int, mode: str) -> None:
    env = make(HumanoidConfig(num_envs=2))
    env.reset(seed=0)
    with pytest.raises(RunError, match=r"none of|no simulation"):
        env.render_simulation(index, mode)
