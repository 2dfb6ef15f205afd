"""A control run with a fake trainer: schedules, lengths, metrics, resume, evaluation, lost workers, NaN."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import multiprocessing
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import (
    CheckpointError,
    ConfigError,
    PluginError,
    PolicyRef,
    RunError,
    TrainerError,
    UpdateUncertain,
)
from tinker_atropos.cli.run import summary
from tinker_atropos.control import ControlSpaces
from tinker_atropos.rollout.fragments import Actor
from tinker_atropos.run import Stopped, run
from tinker_atropos.run_folder import RunFolder, latest_manifest

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


class Killed(BaseException):
    """As good as kill -9: nobody catches it, nothing more is saved."""


@pytest.fixture
def service():
    return fake.FakeControlService()


@pytest.fixture
def registry(service):
    return fake.fake_control_registry(service)


@pytest.fixture
def config(registry, tmp_path):
    return lambda **changes: fake.control_config(registry, tmp_path / "runs", **changes)


def rows_of(config: Any) -> list[dict[str, Any]]:
    return RunFolder(config.folder).read_metrics()


def timeless(config: Any) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock."""
    clocked = ("time", "trainer/busy", "env_steps/per_second")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in clocked} for row in rows_of(config)]


async def test_a_run_writes_a_line_an_update_and_a_whole_folder(config, registry, notes, service):
    c = config()
    finished = await run(c, notes, registry=registry)
    rows = rows_of(c)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["env_steps"] for row in rows] == [32 * n for n in range(1, 7)]
    assert {"episode/count", "env_steps/per_second", "trainer/busy", "staleness/max", "loss/policy"} <= set(rows[0])
    assert any("episode/return" in row for row in rows)
    assert all(("episode/return" in row) == bool(row["episode/count"]) for row in rows)
    manifest = latest_manifest(RunFolder(c.folder))
    assert manifest is not None
    assert (manifest.step, manifest.finished, finished.steps) == (6, True, 6)
    assert service.closed == 1


async def test_episodes_are_followed_across_fragments_and_their_return_is_the_sum_of_rewards(
    config, registry, notes, service
):
    await run(config(trainer__steps_per_update=3, env__total_steps=20), notes, registry=registry)
    parts: list[Any] = []
    told: list[tuple[float, int]] = []
    for batch in service.batches:
        (fragment,) = batch.fragments
        parts.append((fragment.rewards, fragment.terminated | fragment.truncated))
        told += fragment.episodes
    expected = []
    rewards, ended = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    for t, n in np.argwhere(ended):
        before = np.flatnonzero(ended[:t, n])
        start = before[-1] + 1 if len(before) else 0
        expected.append((rewards[start : t + 1, n].sum(), t + 1 - start))
    assert len(told) == len(expected) > 8
    assert max(length for _, length in told) > 3
    np.testing.assert_allclose(told, expected, rtol=1e-5)


async def test_fragments_join_seamlessly_and_finals_are_what_an_episode_ended_with(config, registry, notes, service):
    await run(config(env__total_steps=10), notes, registry=registry)
    fragments = [batch.fragments[0] for batch in service.batches]
    for one, other in itertools.pairwise(fragments):
        np.testing.assert_array_equal(one.observations[-1], other.observations[0])
    for fragment in fragments:
        ended = np.argwhere(fragment.terminated | fragment.truncated)
        assert len(ended) == len(fragment.finals)
        for (t, n), final in zip(ended, fragment.finals, strict=True):
            moved = fragment.observations[t, n, :2] + np.clip(fragment.actions[t, n], -0.5, 0.5)
            np.testing.assert_allclose(final[:2], moved, atol=1e-6)
            assert fragment.observations[t + 1, n, 2] == 0  # the age: a new episode
            assert fragment.truncated[t, n] == (final[2] == 13)


async def test_actions_are_clipped_for_the_simulator_and_kept_as_sampled_for_the_trainer(
    config, registry, notes, service
):
    await run(config(), notes, registry=registry)
    actions = np.concatenate([batch.fragments[0].actions for batch in service.batches])
    assert np.abs(actions).max() > 1
    fragment = service.batches[0].fragments[0]
    moves = np.diff(fragment.observations[:3, :, :2], axis=0)
    np.testing.assert_allclose(moves, np.clip(fragment.actions[:2], -0.5, 0.5), atol=1e-6)


@pytest.mark.parametrize("autoreset", ["SAME_STEP", "DISABLED"])
async def test_either_autoreset_mode_gives_the_same_kind_of_fragment(config, registry, notes, service, autoreset):
    c = config(env__autoreset=autoreset, env__total_steps=10)
    await run(c, notes, registry=registry)
    assert sum(row["episode/count"] for row in rows_of(c)) > 5
    for batch in service.batches:
        ended = batch.fragments[0].terminated | batch.fragments[0].truncated
        assert (batch.fragments[0].observations[1:][ended][:, 2] == 0).all()


async def test_an_autoreset_mode_that_wastes_a_step_is_refused(config, registry, notes):
    with pytest.raises(PluginError, match=r"autoreset mode NEXT_STEP.*SAME_STEP"):
        await run(config(env__autoreset="NEXT_STEP"), notes, registry=registry)


@pytest.mark.parametrize("changes", [{}, {"env__shards": 2}, {"env__shards": 2, "rollout__workers": "inline"}])
async def test_sync_depends_on_the_seed_alone(config, registry, notes, changes):
    curves = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        c = config(run__name=name, run__seed=seed, **changes)
        await run(c, notes, registry=registry)
        curves.append(timeless(c))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


async def test_where_simulations_run_makes_no_difference(config, registry, notes):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    curves = []
    for workers in ("inline", "thread", "process"):
        c = config(run__name=workers, rollout__workers=workers, env__shards=2)
        await run(c, notes, registry=registry)
        curves.append(timeless(c))
    assert curves[0] == curves[1] == curves[2]


async def test_sync_learns_only_from_the_newest_policy_in_fragments_of_every_shard(config, registry, notes, service):
    await run(config(env__shards=4), notes, registry=registry)
    for batch in service.batches:
        assert [fragment.policy.step for fragment in batch.fragments] == [batch.step] * 4
        assert [fragment.rewards.shape for fragment in batch.fragments] == [(8, 1)] * 4


@pytest.mark.parametrize("died_after", [1, 3, 5])
@pytest.mark.parametrize("shards", [1, 2])
async def test_a_resumed_run_equals_an_uninterrupted_one(config, registry, notes, service, died_after, shards):
    whole = config(run__name="whole", env__shards=shards, trainer__steps_per_update=5)
    await run(whole, notes, registry=registry)

    def die(step):
        if step == died_after:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    c = config(run__name="again", env__shards=shards, trainer__steps_per_update=5)
    with pytest.raises(Killed):
        await run(c, notes, registry=registry)
    await run(c, notes, registry=registry, resume=True)
    assert timeless(c) == timeless(whole)


async def test_simulations_that_cant_be_saved_begin_anew_and_the_run_says_so(config, registry, notes, service):
    def die(step):
        if step == 3:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    c = config(run__env="walk")
    with pytest.raises(Killed):
        await run(c, notes, registry=registry)
    await run(c, notes, registry=registry, resume=True)
    assert any("episodes begin anew" in text and "no snapshot()" in text for text in notes.said)
    assert [row["env_steps"] for row in rows_of(c)] == [32 * n for n in range(1, 7)]
    resumed = service.batches[3].fragments[0]
    assert (resumed.observations[0, :, 2] == 0).all()
    assert not np.array_equal(resumed.observations[0], service.batches[0].fragments[0].observations[0])


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_worker_that_dies_during_an_update_costs_a_checkpoint_its_episodes_alone(
    config, registry, notes, service, shards
):
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(fake)

    def kill_one(step):
        if step == 1:  # the checkpoint of step 2 follows
            process = multiprocessing.active_children()[0]
            process.kill()
            process.join()
        if step == 3:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = kill_one
    c = config(rollout__workers="process", env__shards=shards)
    with pytest.raises(Killed):
        await run(c, notes, registry=registry)
    assert [row["step"] for row in rows_of(c)] == [1, 2, 3]
    assert rows_of(c)[2]["rollout/workers_restarted"] == 1
    assert any("ended with code -9; its episodes are cut off there" in text for text in notes.said)
    assert any("the checkpoint holds no episodes" in text for text in notes.said)
    if shards == 1:  # of two the other goes on alone until the new worker is there
        assert service.batches[2].fragments[0].fresh.all()
    await run(c, notes, registry=registry, resume=True)
    assert any("episodes begin anew" in text and "a worker process was lost" in text for text in notes.said)
    assert [row["step"] for row in rows_of(c)] == [1, 2, 3, 4, 5, 6]


async def test_a_first_answer_may_take_longer_than_a_step(config, registry, notes):
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(fake)
    # Starting Python and importing NumPy and Gymnasium takes longer than this; a step of the walk does not.
    c = config(rollout__workers="process", rollout__step_timeout=0.3, env__total_steps=2)
    await run(c, notes, registry=registry)
    assert not any("reset()" in text or "did not start" in text for text in notes.said)


async def test_a_worker_that_never_starts_is_told_from_one_whose_step_hangs(config, registry, notes, monkeypatch):
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(fake)
    monkeypatch.setattr("tinker_atropos.rollout.shards.START_SECONDS", 0.01)
    with pytest.raises(RunError, match=r"did not start, make .* within 0\.02 s .*needs a longer rollout\.step_timeout"):
        await run(config(rollout__workers="process", rollout__step_timeout=0.02), notes, registry=registry)


async def test_simulations_broken_before_a_resume_count_on(config, registry, notes, service):
    def die(step):
        if step == 3:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    with pytest.raises(Killed):
        await run(config(run__env="walk", env__nan="reward"), notes, registry=registry)
    c = config(run__env="walk", env__nan="reward", rollout__max_broken_episodes=1)
    with pytest.raises(RunError, match=r"these are 2, more than rollout\.max_broken_episodes=1"):
        await run(c, notes, registry=registry, resume=True)


async def test_a_lost_reply_rewinds_to_the_last_manifest(config, registry, notes, service):
    whole = config(run__name="whole")
    await run(whole, notes, registry=registry)

    def lose(step):
        if step == 5:
            service.on_update = lambda step: None
            raise UpdateUncertain("the reply was lost")

    service.on_update = lose
    c = config()
    await run(c, notes, registry=registry)
    assert any("Rewinding to step 4" in text for text in notes.said)
    assert timeless(c) == timeless(whole)


async def test_a_damaged_state_beside_a_manifest_is_named(config, registry, notes):
    c = config()
    await run(c, notes, registry=registry)
    (c.folder / "manifests" / "step-000006.npz").write_bytes(b"PK\x03\x04 half a file")
    with pytest.raises(CheckpointError, match=r"step-000006\.npz can't be read"):
        await run(config(env__total_steps=8), notes, registry=registry, resume=True)


@pytest.mark.parametrize("staleness", [0, 1, 3])
async def test_async_collects_ahead_and_staleness_is_a_hard_bound(config, registry, notes, service, staleness):
    service.update_seconds = 0.01
    c = config(trainer__schedule="async", rollout__max_staleness=staleness, env__total_steps=12, env__shards=2)
    await run(c, notes, registry=registry)
    ages = [batch.step - fragment.policy.step for batch in service.batches for fragment in batch.fragments]
    assert max(ages) == staleness
    assert min(ages) >= 0
    assert max(row["staleness/max"] for row in rows_of(c)) == staleness
    ids = [fragment.id for batch in service.batches for fragment in batch.fragments]
    assert len(ids) == len(set(ids)) == 24
    assert not any("fragments/discarded/stale" in row for row in rows_of(c))


async def test_async_collects_no_more_than_is_trained_on(config, registry, notes, service):
    service.update_seconds = 0.005
    await run(config(trainer__schedule="async", env__total_steps=5), notes, registry=registry)
    assert service.acted == 5 * 8


async def test_async_restarts_episodes_on_resume_and_says_so(config, registry, notes, service):
    def die(step):
        if step == 3:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    c = config(trainer__schedule="async")
    with pytest.raises(Killed):
        await run(c, notes, registry=registry)
    await run(c, notes, registry=registry, resume=True)
    assert any("episodes begin anew" in text and "async" in text for text in notes.said)
    assert [row["step"] for row in rows_of(c)] == [1, 2, 3, 4, 5, 6]


async def test_a_run_ends_at_its_environment_steps(config, registry, notes, service):
    c = config(trainer__total_env_steps=100)  # 3.125 updates of 32
    finished = await run(c, notes, registry=registry)
    assert finished.steps == 4
    assert rows_of(c)[-1]["env_steps"] == 128
    assert service.starts[0][0].total_env_steps == 100


async def test_a_run_that_ends_by_updates_tells_the_trainer_its_environment_steps(config, registry, notes, service):
    await run(config(env__total_steps=3), notes, registry=registry)
    assert service.starts[0][0].total_env_steps == 96


async def test_a_finished_run_can_be_resumed_to_more_steps(config, registry, notes, service):
    long = config(run__name="long", env__total_steps=9)
    await run(long, notes, registry=registry)
    await run(config(), notes, registry=registry)
    longer = config(env__total_steps=9)
    await run(longer, notes, registry=registry, resume=True)
    assert timeless(longer) == timeless(long)


async def test_a_stop_saves_a_checkpoint_that_continues_exactly(config, registry, notes, service):
    whole = config(run__name="whole")
    await run(whole, notes, registry=registry)
    stop = asyncio.Event()
    service.on_update = lambda step: stop.set() if step == 2 else None
    c = config(trainer__save_checkpoint_interval=0)
    with pytest.raises(Stopped, match=r"stopped at step 3 of 6.*--resume --name small"):
        await run(c, notes, registry=registry, stop=stop)
    service.on_update = lambda step: None
    await run(c, notes, registry=registry, resume=True)
    assert timeless(c) == timeless(whole)


async def test_evaluations_play_whole_episodes_with_the_mode_action_and_leave_pictures(
    config, registry, notes, service
):
    c = config(env__steps_per_eval=3, rollout__eval_episodes=6)
    finished = await run(c, notes, registry=registry)
    rows = [row for row in rows_of(c) if "eval/return" in row]
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[0]["eval/episodes"] == 6
    assert rows[0]["eval/return_std"] > 0
    assert 1 < rows[0]["eval/length"] <= 13
    assert finished.last_evaluation["eval/return"] == rows[-1]["eval/return"]
    places = sorted(path.name for path in (c.folder / "evaluations").iterdir())
    assert places == ["step-000003.jsonl.gz", "step-000006.jsonl.gz", "step-000006.png"]
    Image = pytest.importorskip("PIL.Image")

    assert Image.open(c.folder / "evaluations" / "step-000006.png").size == (5 * 300 + 4 * 4, 30 + 4 * 200 + 3 * 4)


async def test_the_last_lines_name_updates_steps_and_the_return(config, registry, notes):
    c = config(env__steps_per_eval=6)
    lines = summary(c, await run(c, notes, registry=registry)).splitlines()
    assert lines[0] == f"finished 6 updates, 192 environment steps, in {c.folder}"
    assert lines[1].startswith("evaluation return ")
    assert lines[-1].endswith("--env-steps 384")
    assert not any("checkpoint list" in line for line in lines)


async def test_evaluating_changes_nothing_of_training(config, registry, notes):
    curves = []
    for name, every in (("with", 1), ("without", 0)):
        c = config(run__name=name, env__steps_per_eval=every)
        await run(c, notes, registry=registry)
        curves.append([{k: v for k, v in row.items() if not k.startswith("eval/")} for row in timeless(c)])
    assert curves[0] == curves[1]


async def test_pictures_that_cant_be_drawn_are_a_line_and_no_failure(config, registry, notes, monkeypatch):
    def broken(self):
        raise OSError("no display")

    monkeypatch.setattr(fake.FakeWalk, "render", broken)
    await run(config(env__steps_per_eval=6), notes, registry=registry)
    assert any("no picture sheet: rendering failed: OSError: no display" in text for text in notes.said)


@pytest.mark.parametrize("what", ["observation", "reward"])
async def test_a_nan_resets_that_simulation_alone_and_is_named_and_counted(config, registry, notes, service, what):
    c = config(env__nan=what)
    await run(c, notes, registry=registry)
    said = f"resumable_walk: simulation 1 met a NaN or infinite {what} in its step 5"
    assert any(said in text for text in notes.said)
    assert [row.get("rollout/simulations_broken") for row in rows_of(c)] == [1, None, None, None, None, None]
    fragment = service.batches[0].fragments[0]
    assert all(np.isfinite(getattr(fragment, name)).all() for name in fake.ARRAYS)
    assert (fragment.truncated[4, 1], fragment.terminated[4, 1], fragment.rewards[4, 1]) == (True, False, 0)
    place = np.argwhere(fragment.terminated | fragment.truncated).tolist().index([4, 1])
    np.testing.assert_array_equal(fragment.finals[place], fragment.observations[4, 1])
    assert fragment.observations[5, 1, 2] == 0
    assert (fragment.observations[5, [0, 2, 3], 2] == 5).all()


async def test_a_fault_that_the_environment_contained_is_counted_and_its_episode_is_not(
    config, registry, notes, service
):
    c = config(env__nan="contained")
    await run(c, notes, registry=registry)
    assert any("simulation 1 met a fault that the environment contained itself" in text for text in notes.said)
    assert rows_of(c)[0]["rollout/simulations_broken"] == 1
    fragment = service.batches[0].fragments[0]
    assert fragment.truncated[4, 1]
    assert len(fragment.episodes) == np.sum(fragment.terminated | fragment.truncated) - 1


async def test_too_many_nans_end_the_run(config, registry, notes):
    with pytest.raises(RunError, match=r"simulation 1 .* more than rollout\.max_broken_episodes=0"):
        await run(config(env__nan="reward", rollout__max_broken_episodes=0), notes, registry=registry)


async def test_a_nan_action_never_reaches_the_simulator(config, registry, notes, service):
    service.nan_action_at = 4
    c = config()
    await run(c, notes, registry=registry)
    assert any("simulation 0 met a NaN or infinite action in its step 3" in text for text in notes.said)
    fragment = service.batches[0].fragments[0]
    assert all(np.isfinite(getattr(fragment, name)).all() for name in fake.ARRAYS)
    assert fragment.truncated[2, 0]
    assert (fragment.observations[3, :, 2] == [0, 3, 3, 3]).all()
    place = np.argwhere(fragment.terminated | fragment.truncated).tolist().index([2, 0])
    assert fragment.finals[place][2] == 3  # what the last sound action led to


@pytest.mark.parametrize("shards", [1, 2])
async def test_an_episode_that_a_nan_ends_between_two_fragments_is_marked_in_the_later_one(
    config, registry, notes, service, shards
):
    """In `sync` the fragment before was learned from already: it can't be truncated any more."""
    service.nan_action_at = 8 * shards + 1  # the first action of the second update's first fragment
    c = config(env__shards=shards)
    await run(c, notes, registry=registry)
    width = 4 // shards
    (place,) = (n for n, part in enumerate(service.batches[1].fragments) if part.fresh is not None)  # which was first?
    assert any(f"simulation {place * width} met a NaN or infinite action in its step 8" in said for said in notes.said)
    assert rows_of(c)[1]["rollout/simulations_broken"] == 1
    before, after = (batch.fragments[place] for batch in service.batches[:2])
    assert before.fresh.tolist() == [True] * width  # the beginning
    assert not before.truncated[-1, 0]
    assert after.fresh.tolist() == [True] + [False] * (width - 1)
    assert after.observations[0, 0, 2] == 0
    np.testing.assert_array_equal(after.observations[0, 1:], before.observations[-1, 1:])
    assert all(np.isfinite(getattr(after, name)).all() for name in fake.ARRAYS)
    later = [fragment.fresh for batch in service.batches[2:] for fragment in batch.fragments]
    assert later == [None] * len(later)


async def test_a_policy_of_nothing_but_nan_ends_the_run(config, registry, notes, service, monkeypatch):
    act = fake.FakePolicy.act

    def nan(self, observations, rng):
        acted = act(self, observations, rng)
        acted.actions[:] = np.nan
        return acted

    monkeypatch.setattr(fake.FakePolicy, "act", nan)
    with pytest.raises(TrainerError, match="gives NaN actions for fresh episodes too"):
        await run(config(), notes, registry=registry)


def test_a_discrete_policy_of_nan_is_noticed_by_its_logprobs(service):
    service.nan_logprobs = True
    space = gymnasium.spaces.Discrete(3)
    actor = Actor(ControlSpaces(gymnasium.spaces.Box(-1, 1, (2,)), space, "choice"), threading.Lock())
    policy = fake.FakePolicy(service, PolicyRef("r", 0, 7, "fake://7"), 0, True, 3)
    actions, logprobs = np.zeros(4, np.int64), np.zeros(4, np.float32)
    with pytest.raises(TrainerError, match=r"policy of step 7 gave a NaN or infinite log-probability"):
        actor.choose(policy, np.zeros((4, 2), np.float32), np.random.default_rng(0), actions, logprobs)


async def test_the_threads_of_the_simulator_may_change_on_resume(config, registry, notes):
    await run(config(env__threads=1), notes, registry=registry)
    longer = config(env__threads=2, env__total_steps=8)
    assert (await run(longer, notes, registry=registry, resume=True)).steps == 8
    with pytest.raises(ConfigError, match=r"resumable_walk\.horizon was 13, now 14"):
        await run(config(env__horizon=14, env__total_steps=9), notes, registry=registry, resume=True)


async def test_actions_of_a_wrong_shape_are_named(config, registry, notes, monkeypatch):
    act = fake.FakePolicy.act

    def flat(self, observations, rng):
        acted = act(self, observations, rng)
        return fake.Acted(acted.actions[:, :1], acted.logprobs)

    monkeypatch.setattr(fake.FakePolicy, "act", flat)
    with pytest.raises(TrainerError, match=r"actions of shape \(4, 1\).*expected \(4, 2\)"):
        await run(config(), notes, registry=registry)


@pytest.mark.parametrize("workers", ["inline", "thread"])
async def test_a_simulator_that_fails_ends_the_run_with_its_cause(config, registry, notes, workers):
    with pytest.raises(RunError, match=r"environment 'resumable_walk' failed in step\(\): ValueError: the floor"):
        await run(config(env__raises=True, rollout__workers=workers), notes, registry=registry)


async def test_a_lost_worker_truncates_its_fragment_and_comes_back_while_the_others_go_on(
    config, registry, notes, service, tmp_path
):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    c = config(env__shards=2, rollout__workers="process", env__exit_file=str(tmp_path / "gone"))
    await run(c, notes, registry=registry)
    assert any("ended with code 3; its fragment is cut off" in text for text in notes.said)
    assert rows_of(c)[0]["rollout/workers_restarted"] == 1
    assert [row["env_steps"] for row in rows_of(c)] == [32 * n for n in range(1, 7)]
    first = service.batches[0].fragments
    assert sorted(fragment.rewards.shape for fragment in first) == [(2, 2), (6, 2), (8, 2)]
    (lost,) = (fragment for fragment in first if fragment.lost is not None)
    assert len(lost.rewards) == 6
    assert (lost.truncated[-1] | lost.terminated[-1]).all()
    assert len(lost.finals) == np.sum(lost.truncated | lost.terminated)
    assert all(fragment.lost is None for batch in service.batches[1:] for fragment in batch.fragments)


@pytest.mark.parametrize("schedule", ["sync", "async"])
async def test_a_worker_that_hangs_is_ended_and_counts_as_lost(config, registry, notes, service, tmp_path, schedule):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    c = config(
        env__shards=2,
        rollout__workers="process",
        rollout__step_timeout=8.0,
        env__hang_file=str(tmp_path / "hung"),
        trainer__schedule=schedule,
    )
    await run(c, notes, registry=registry)
    assert any(
        "did not answer step() for 8 s (rollout.step_timeout) and was ended; its fragment is cut off" in text
        for text in notes.said
    )
    assert sum(row.get("rollout/workers_restarted", 0) for row in rows_of(c)) == 1
    assert rows_of(c)[-1]["step"] == 6
    (lost,) = (part for batch in service.batches for part in batch.fragments if part.lost is not None)
    assert len(lost.rewards) == 6
    assert (lost.truncated[-1] | lost.terminated[-1]).all()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "hung").read_text()), 0)


async def test_async_goes_on_after_a_lost_worker_too(config, registry, notes, service, tmp_path):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    service.update_seconds = 0.01
    c = config(
        env__shards=2, rollout__workers="process", env__exit_file=str(tmp_path / "gone"), trainer__schedule="async"
    )
    await run(c, notes, registry=registry)
    assert sum(row.get("rollout/workers_restarted", 0) for row in rows_of(c)) == 1
    assert rows_of(c)[-1]["env_steps"] >= 192
    assert max(row["staleness/max"] for row in rows_of(c)) <= 1
    ids = [fragment.id for batch in service.batches for fragment in batch.fragments]
    assert len(ids) == len(set(ids))


async def test_a_worker_that_is_lost_each_time_ends_the_run(config, registry, notes, monkeypatch):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    monkeypatch.setattr("tinker_atropos.rollout.control.MAX_RESTARTS", 1)
    c = config(rollout__workers="process", env__exit_file="always", trainer__steps_per_update=20)
    with pytest.raises(RunError, match=r"code 3, 2 times without a whole fragment.*rollout\.workers=thread"):
        await run(c, notes, registry=registry)


async def test_a_simulator_that_fails_in_a_worker_ends_the_run_with_its_cause(config, registry, notes):
    import cloudpickle

    cloudpickle.register_pickle_by_value(fake)
    with pytest.raises(RunError, match=r"failed in step\(\): ValueError: the floor is missing"):
        await run(config(env__raises=True, rollout__workers="process"), notes, registry=registry)


async def test_discrete_observations_become_rows_of_which_one_number_is_1(registry, notes, service, config):
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from tinker_atropos import EnvironmentConfig, EnvironmentSpec

    class LakeConfig(EnvironmentConfig):
        num_envs: int = 4

    def make(config):
        return SyncVectorEnv(
            [lambda: gymnasium.make("FrozenLake-v1")] * config.num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )

    registry.add("env", EnvironmentSpec("lake", make=make, kind="control", config=LakeConfig))
    await run(config(run__env="lake"), notes, registry=registry)
    assert service.starts[0][1].observation.shape == (16,)
    for batch in service.batches:
        (fragment,) = batch.fragments
        assert fragment.observations.shape == (9, 4, 16)
        assert (fragment.observations.sum(-1) == 1).all()
        assert (fragment.finals.sum(-1) == 1).all()
        assert (fragment.finals[:, 0] == 0).all()  # no episode ends where it begins


async def test_gymnasiums_own_cartpole_goes_through_the_loop(registry, notes, service, config):
    from gymnasium.vector import AutoresetMode, SyncVectorEnv
    from tinker_atropos import EnvironmentConfig, EnvironmentSpec

    class CartPoleConfig(EnvironmentConfig):
        num_envs: int = 4

    def make(config):
        return SyncVectorEnv(
            [lambda: gymnasium.make("CartPole-v1")] * config.num_envs, autoreset_mode=AutoresetMode.SAME_STEP
        )

    registry.add("env", EnvironmentSpec("cartpole", make=make, kind="control", config=CartPoleConfig))
    c = config(run__env="cartpole", trainer__steps_per_update=64, env__shards=2, env__steps_per_eval=6)
    await run(c, notes, registry=registry)
    rows = rows_of(c)
    assert rows[-1]["env_steps"] == 6 * 64 * 4
    assert all(row["episode/return"] == row["episode/length"] > 5 for row in rows if "episode/return" in row)
    assert service.batches[0].fragments[0].actions.dtype == np.int64
    assert any("no picture sheet: environment 'cartpole' has no setting render_mode" in text for text in notes.said)
