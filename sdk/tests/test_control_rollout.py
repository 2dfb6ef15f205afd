"""Control below the run: staleness at the take, snapshots in a file, configuration, texts, the contract test."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tinker_atropos import Checkpoint, ConfigError, EnvironmentSpec, PluginError, PolicyRef, load_environment
from tinker_atropos.cli.control_lines import volume
from tinker_atropos.cli.run import describe
from tinker_atropos.config import load
from tinker_atropos.control import ControlSpaces
from tinker_atropos.control_state import ControlState, prune_states, read_state, state_file, write_state
from tinker_atropos.rollout.control import ControlCollector, Pace
from tinker_atropos.rollout.control_plan import control_plan
from tinker_atropos.rollout.fragments import Actor, Broken, Lane
from tinker_atropos.rollout.shards import InlineShard, ThreadShard
from tinker_atropos.rollout.simulations import Shape
from tinker_atropos.run_folder import Manifest, RunFolder
from tinker_atropos.testing import ContractViolated, check_control, check_environment
from tinker_atropos.yaml_file import read_yaml

gymnasium = pytest.importorskip("gymnasium")


def beside(name: str) -> Any:
    """Load a module that lies beside this one."""
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]


fake = beside("fake_control")


@pytest.fixture
def registry():
    return fake.fake_control_registry(fake.FakeControlService())


@pytest.fixture
def config(registry, tmp_path):
    return lambda **changes: fake.control_config(registry, tmp_path / "runs", **changes)


def collector_of(pace: Pace, shards: int = 2, **settings: Any) -> ControlCollector:
    make = lambda: fake.FakeResumableWalk(fake.FakeWalkConfig(num_envs=2, **settings))  # noqa: E731
    example = make()
    spaces = ControlSpaces(example.single_observation_space, example.single_action_space, "walk")
    shape = Shape.of(spaces, 2)
    actor, broken = Actor(spaces, threading.Lock()), Broken(print, 5, "walk")
    lanes = [
        Lane(index, InlineShard(make, "walk", shape), shape, actor, broken, pace.fragment_steps)
        for index in range(shards)
    ]
    collector = ControlCollector(lanes, pace, seed=0, lineage=0, first_update=0, say=print)
    collector.open()
    return collector


def settled(collector: ControlCollector, fragments: int) -> None:
    """Wait until so many fragments are ready."""
    while len(collector._ready) < fragments:
        time.sleep(0.001)


def policy_of(step: int) -> Any:
    return fake.FakePolicy(fake.FakeControlService(), PolicyRef("r", 0, step, f"fake://{step}"), step, False, 2)


async def test_a_stale_fragment_is_dropped_counted_and_collected_anew():
    collector = collector_of(Pace(fragment_steps=4, batch_steps=16, total_updates=9, max_staleness=1))
    try:
        collector.publish(policy_of(0))
        first = await collector.batch(0)
        await asyncio.to_thread(settled, collector, 2)  # the next batch, of the policy of step 0 too
        collector.release(first)
        collector.publish(policy_of(2))
        batch = await collector.batch(2)
        assert [fragment.policy.step for fragment in batch] == [2, 2]
        counts = collector.take_counts()
        assert counts.discarded == {"stale": 2}
        assert counts.discarded_steps == 16
    finally:
        await asyncio.to_thread(collector.close)


async def test_arrays_are_used_again_once_they_are_released():
    collector = collector_of(Pace(fragment_steps=4, batch_steps=16, total_updates=9, max_staleness=0))
    places = []
    try:
        for step in range(4):
            collector.publish(policy_of(step))
            batch = await collector.batch(step)
            places.append([fragment.observations.ctypes.data for fragment in batch])
            collector.release(batch)
    finally:
        await asyncio.to_thread(collector.close)
    assert all(other == places[0] for other in places)


async def test_closing_ends_the_thread_and_closes_every_simulation():
    collector = collector_of(Pace(fragment_steps=4, batch_steps=16, total_updates=9, max_staleness=0))
    collector.publish(policy_of(0))
    await collector.batch(0)
    await asyncio.to_thread(collector.close)
    assert collector._thread is not None
    assert not collector._thread.is_alive()
    lanes: Any = collector._lanes
    assert all(lane.shard._simulations._environment.closed for lane in lanes)


class GatedWalk(fake.FakeResumableWalk):  # type: ignore[name-defined]
    """Steps when it is let, and knows whether it was closed meanwhile."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.stepping, self.go_on = threading.Event(), threading.Event()
        self.closed_while_stepping = False

    def step(self, actions: Any) -> Any:
        self.stepping.set()
        self.go_on.wait()
        self.stepping.clear()
        return super().step(actions)

    def close(self, **kwargs: Any) -> None:
        self.closed_while_stepping = self.stepping.is_set()
        super().close()


def gated_collector(kind: Any) -> tuple[ControlCollector, GatedWalk, list[str]]:
    walk, said = GatedWalk(fake.FakeWalkConfig(num_envs=2)), list[str]()
    spaces = ControlSpaces(walk.single_observation_space, walk.single_action_space, "walk")
    shape = Shape.of(spaces, 2)
    lane = Lane(0, kind(lambda: walk, "walk", shape), shape, Actor(spaces, threading.Lock()), Broken(print, 5, "w"), 4)
    pace = Pace(fragment_steps=4, batch_steps=8, total_updates=9, max_staleness=0)
    collector = ControlCollector([lane], pace, seed=0, lineage=0, first_update=0, say=said.append)
    collector.open()
    return collector, walk, said


@pytest.mark.parametrize("kind", [InlineShard, ThreadShard])
async def test_an_environment_is_not_closed_while_it_steps(kind):
    collector, walk, _ = gated_collector(kind)
    collector.publish(policy_of(0))
    await asyncio.to_thread(walk.stepping.wait)
    closing = asyncio.create_task(asyncio.to_thread(collector.close))
    await asyncio.sleep(1.5)
    assert not walk.closed
    walk.go_on.set()
    await closing
    assert walk.closed
    assert not walk.closed_while_stepping


@pytest.mark.parametrize("kind", [InlineShard, ThreadShard])
async def test_an_environment_whose_step_hangs_is_left_open(kind, monkeypatch):
    for module in ("control", "shards"):
        monkeypatch.setattr(f"tinker_atropos.rollout.{module}.CLOSE_SECONDS", 0.05)
    collector, walk, said = gated_collector(kind)
    collector.publish(policy_of(0))
    await asyncio.to_thread(walk.stepping.wait)
    await asyncio.to_thread(collector.close)
    assert not walk.closed
    assert said == ["a step did not end within 0.05 s; its simulations are left open"]
    walk.go_on.set()


def test_a_state_comes_back_from_its_file_as_it_was(tmp_path):
    rng = np.random.default_rng(5)
    places = rng.random((3, 2))
    lane = {"rng": rng.bit_generator.state, "places": places, "deep": {"list": [1, 2.5, None, "x", True]}}
    write_state(tmp_path / "s.npz", ControlState(64, 7, [lane, lane]))
    state = read_state(tmp_path / "s.npz")
    assert (state.env_steps, state.ordinal) == (64, 7)
    assert state.lanes is not None
    again = np.random.default_rng()
    again.bit_generator.state = state.lanes[1]["rng"]
    assert again.random() == rng.random()
    np.testing.assert_array_equal(state.lanes[0]["places"], lane["places"])
    assert state.lanes[0]["deep"] == lane["deep"]


def test_states_go_with_the_checkpoints_that_the_trainer_removed(tmp_path):
    folder = RunFolder(tmp_path / "a run")
    folder.create({})
    for step in range(1, 8):
        state = tmp_path / f"state {step}.pt"
        if step in (2, 5):
            state.touch()
        uri = "tinker://elsewhere/3" if step == 3 else state.as_uri()
        checkpoint = Checkpoint(f"step-{step}", step, uri, uri)
        folder.write_manifest(Manifest("a run", 0, step, checkpoint, (), {"next": 0, "open": []}))
        write_state(state_file(folder.path, step), ControlState(step, 0, None))
    assert [path.name for path in prune_states(folder)] == [f"step-00000{step}.npz" for step in (1, 4)]
    kept = sorted(path.name for path in (folder.path / "manifests").glob("*.npz"))
    assert kept == [f"step-00000{step}.npz" for step in (2, 3, 5, 6, 7)]
    assert prune_states(folder) == []
    folder.close()


def test_a_snapshot_of_live_objects_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"holds <object .* at lanes\.0\.simulator"):
        write_state(tmp_path / "s.npz", ControlState(0, 0, [{"simulator": object()}]))


STEPS, ENV_STEPS = ("env.total_steps", 4, "--steps"), ("trainer.total_env_steps", 100, "--env-steps")
WALK = [("run.env", "walk", "--env"), ("run.trainer", "fake_control", "--trainer")]


@pytest.mark.parametrize(("given", "steps", "env_steps"), [([STEPS], 4, 128), ([ENV_STEPS], 4, 100), ([], 50, 1600)])
def test_a_length_is_given_once_and_both_are_known(registry, given, steps, env_steps):
    config = load(None, [*WALK, *given], registry=registry)
    assert (config.env.total_steps, config.trainer.total_env_steps) == (steps, env_steps)


@pytest.mark.parametrize(
    ("content", "given"),
    [
        ("", [STEPS, ENV_STEPS]),
        ("env: {total_steps: 4}", [ENV_STEPS]),
        ("fake_control: {total_env_steps: 100}", [STEPS]),
        ("env: {total_steps: 4}\ntrainer: {total_env_steps: 100}", []),
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_two_lengths_are_refused_even_where_they_agree(config, registry, tmp_path, content, given, resumed):
    file = tmp_path / "c.yaml"
    file.write_text(content)
    base = config(run__env="walk", env__total_steps=2).as_dict() if resumed else None
    with pytest.raises(ConfigError) as refused:
        load(file, [*WALK, *given], registry=registry, base=base)
    said = str(refused.value)
    assert "env.total_steps=4 (" in said
    assert "fake_control.total_env_steps=100 (" in said
    assert "both say where the run ends; keep one" in said
    assert "4 updates are --env-steps 128" in said


def test_null_takes_a_files_length_back(registry, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("fake_control: {total_env_steps: 100}\n")
    nothing = ("trainer.total_env_steps", None, "--set trainer.total_env_steps")
    config = load(file, [*WALK, STEPS, nothing], registry=registry)
    assert (config.env.total_steps, config.trainer.total_env_steps) == (4, 128)


@pytest.mark.parametrize(
    ("length", "written", "derived"),
    [("trainer__total_env_steps", "fake_control", "env"), ("env__total_steps", "env", "fake_control")],
)
def test_a_resolved_file_gives_the_same_configuration_again(config, registry, tmp_path, length, written, derived):
    first = config(env__shards=2, **{length: 100})
    key = {"env": "total_steps", "fake_control": "total_env_steps"}
    assert first.as_dict()[written][key[written]] == 100
    assert key[derived] not in first.as_dict()[derived]
    file = tmp_path / "config.yaml"
    from tinker_atropos.yaml_file import write_yaml

    file.write_text(write_yaml(first.as_dict()))
    again = load(file, registry=registry)
    assert again.as_dict() == first.as_dict()
    assert again.unused == {}


@pytest.mark.parametrize("begun_with", [{"trainer__total_env_steps": 100}, {"env__total_steps": 3}, {}])
@pytest.mark.parametrize(
    ("asked", "steps", "env_steps"),
    [
        ([], None, None),
        ([("env.total_steps", 9, "--steps")], 9, 288),
        ([("trainer.total_env_steps", 320, "--env-steps")], 10, 320),
    ],
)
def test_a_resumed_run_ends_where_it_did_or_where_one_option_says(
    config, registry, begun_with, asked, steps, env_steps
):
    first = config(**begun_with)
    again = load(None, asked, registry=registry, base=first.as_dict())
    before = (first.env.total_steps, first.trainer.total_env_steps)
    assert (again.env.total_steps, again.trainer.total_env_steps) == (before if steps is None else (steps, env_steps))
    assert again.unused == {}
    third = load(None, registry=registry, base=again.as_dict())
    assert third.as_dict() == again.as_dict()


@pytest.mark.parametrize(
    ("key", "value"),
    [("env.group_size", 16), ("env.batch_size", 8), ("rollout.temperature", 1.0), ("run.previews", 3)],
)
def test_keys_of_text_are_refused_as_overrides_and_reported_from_a_file(config, registry, tmp_path, key, value):
    with pytest.raises(ConfigError, match=rf"{key}: has no effect here: there are no groups and no tokens in control"):
        config(**{key.replace(".", "__"): value})
    section, _, name = key.partition(".")
    file = tmp_path / "c.yaml"
    file.write_text(f"{section}: {{{name}: {value}0}}\n".replace(".00", ".5"))
    loaded = load(file, [("run.env", "walk", "--env"), ("run.trainer", "fake_control", "--trainer")], registry=registry)
    assert key in loaded.unused


def test_staleness_has_no_effect_in_sync(config):
    with pytest.raises(ConfigError, match=r"fake_control\.schedule is sync, so every step is of the newest policy"):
        config(rollout__max_staleness=2)
    assert control_plan(config()).max_staleness == 0
    assert control_plan(config(rollout__max_staleness=2, trainer__schedule="async")).max_staleness == 2


def test_shards_must_divide_the_simulations(config):
    with pytest.raises(
        ConfigError, match=r"env\.shards: 3 equal shards .* env\.num_envs=4 simulations; use one of 1, 2, 4"
    ):
        config(env__shards=3)


def test_an_environment_without_num_envs_is_named(registry):
    registry.add("env", EnvironmentSpec("stuck", make=print, kind="control"))
    with pytest.raises(PluginError, match=r"environment 'stuck' .* no field 'num_envs'"):
        load(None, [("run.env", "stuck", "--env"), ("run.trainer", "fake_control", "--trainer")], registry=registry)


def test_a_dry_run_speaks_of_updates_and_simulations_and_can_be_read_again(config, registry, tmp_path):
    c = config(env__shards=2, trainer__total_env_steps=1000)
    text = describe(c)
    assert volume(c)[0] == (
        "32 updates of 32 environment steps (8 steps of 4 simulations, in 2 shards, in threads; schedule sync): "
        "1,024 in all"
    )
    assert "group" not in text.replace("groups of simulations", "")
    file = tmp_path / "printed.yaml"
    file.write_text(text)
    assert "adapter" not in read_yaml(file)["rollout"]
    assert load(file, registry=registry).as_dict() == c.as_dict()


def test_the_command_line_knows_env_steps_and_num_envs():
    from tinker_atropos.cli import cli

    said = CliRunner().invoke(cli, ["run", "--help"]).output
    assert "--env-steps" in said
    assert "--num-envs" in said


def test_load_environment_gives_the_vector_environment(tmp_path):
    (tmp_path / "my_walk.py").write_text(
        f"import importlib.util, sys\nfake = sys.modules['{fake.__name__}']\n"
        "from tinker_atropos import EnvironmentSpec\n"
        "env = EnvironmentSpec('walk', make=fake.FakeWalk, kind='control', config=fake.FakeWalkConfig)\n"
    )
    environment = load_environment(f"{tmp_path}/my_walk.py", num_envs=7)
    assert environment.num_envs == 7
    with pytest.raises(ConfigError, match=r"num_envs"):
        load_environment(f"{tmp_path}/my_walk.py", num_envs="seven")


def spec_of(kind: Any, **settings: Any) -> EnvironmentSpec:
    return EnvironmentSpec(
        "walk",
        make=lambda config: kind(config.model_copy(update=settings)),
        kind="control",
        config=fake.FakeWalkConfig,
    )


@pytest.mark.parametrize("kind", ["FakeWalk", "FakeResumableWalk"])
@pytest.mark.parametrize("autoreset", ["SAME_STEP", "DISABLED"])
def test_check_environment_passes_sound_walks(kind, autoreset):
    check_environment(spec_of(getattr(fake, kind), autoreset=autoreset))


def test_check_environment_passes_gymnasiums_cartpole():
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    def make(num_envs):
        made = [lambda: gymnasium.make("CartPole-v1")] * num_envs
        return SyncVectorEnv(made, autoreset_mode=AutoresetMode.SAME_STEP)

    check_control(make)


FakeWalk: Any = fake.FakeWalk
FakeResumableWalk: Any = fake.FakeResumableWalk


class Unseeded(FakeWalk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if seed is None else np.random.default_rng().integers(99999), options=options)


class Shared(FakeWalk):
    everybodys = np.zeros((3, 2))

    def __init__(self, config):
        super().__init__(config)
        self.places = self.everybodys


class Endless(FakeWalk):
    def step(self, actions):
        *rest, _ = super().step(actions)
        return *rest, {}


class Infinite(FakeWalk):
    def step(self, actions):
        observations, rewards, *rest = super().step(actions)
        return observations, np.where(self.ages == 4, np.inf, rewards), *rest


class Flat(FakeWalk):
    def _observe(self):
        return super()._observe()[:, :2]


class Silent(FakeWalk):
    def __init__(self, config):
        super().__init__(config)
        self.metadata = {}


class Forgetful(FakeResumableWalk):
    def restore(self, state):
        super().restore({**state, "rng": np.random.default_rng(0).bit_generator.state})


class Unclosable(FakeWalk):
    def close(self, **kwargs):
        raise OSError("busy")


class Wholesale(FakeWalk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Unseeded, {}, "the second time"),
        (Shared, {}, "beside another instance"),
        (Endless, {}, "no info\\['final_obs'\\]"),
        (Infinite, {}, "the reward inf"),
        (Flat, {}, r"observations of shape \(3, 2\); expected \(3, 3\)"),
        (Silent, {}, "states no autoreset mode"),
        (Forgetful, {}, r"after restore\(\)"),
        (Unclosable, {}, r"close\(\) raised OSError: busy"),
        (Wholesale, {"autoreset": "DISABLED"}, "which the mask leaves out"),
        (Wholesale, {"autoreset": "SAME_STEP", "horizon": 1000}, "which the mask leaves out"),
        (fake.FakeWalk, {"autoreset": "NEXT_STEP"}, "NEXT_STEP"),
        (fake.FakeWalk, {"num_envs": 5}, "asked for 3 simulations, it made 5"),
        (fake.FakeWalk, {"nan": "observation"}, "which is not in its space"),
        (fake.FakeWalk, {"raises": True}, r"step\(\) raised ValueError: the floor"),
    ],
)
def test_check_environment_catches(kind, settings, message):
    with pytest.raises(ContractViolated, match=message):
        check_environment(spec_of(kind, **settings))


async def test_a_partial_reset_that_is_none_is_refused_while_collecting():
    collector = collector_of(Pace(fragment_steps=8, batch_steps=32, total_updates=2, max_staleness=0), nan="reward")
    lanes: Any = collector._lanes
    for lane in lanes:
        environment = lane.shard._simulations._environment
        environment.reset = lambda seed=None, options=None, own=environment: fake.FakeWalk.reset(own, seed=seed)
    try:
        collector.publish(policy_of(0))
        with pytest.raises(PluginError, match=r"must heed reset\(options="):
            await collector.batch(0)
    finally:
        await asyncio.to_thread(collector.close)
