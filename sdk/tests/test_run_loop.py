"""The run loop with a fake trainer: steps, staleness, filtering, failures, resume, rewind, stop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

import pytest
from tinker_atropos import (
    CheckpointError,
    ConfigError,
    DataError,
    EnvironmentSpec,
    EpisodesFailed,
    FilteredOut,
    PolicyUnavailable,
    Step,
    Task,
    TrainerError,
    UpdateUncertain,
    single_turn,
)
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run import Stopped, run
from tinker_atropos.run_folder import RunFolder, latest_manifest
from tinker_atropos.testing import LedgerViolated, check_ledger


class Killed(BaseException):
    """As good as kill -9: nobody catches it, nothing more is saved."""


def metrics_of(config: Any) -> list[dict[str, Any]]:
    return RunFolder(config.folder).read_metrics()


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock."""
    clocked = ("time", "tokens/per_second", "trainer/busy")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in clocked} for row in rows]


def records_of(config: Any) -> list[dict[str, Any]]:
    """Rollout records without what names the lineage."""
    found = []
    for path in sorted((config.folder / "rollouts").glob("step-*.jsonl.gz")):
        for record in read_records(path):
            record.pop("group")
            for trajectory in record["trajectories"]:
                trajectory.pop("policies")
            found.append(record)
    return found


async def test_a_run_trains_every_step_and_leaves_a_whole_folder(make_config, registry, notes, service):
    config = make_config()
    finished = await run(config, notes, registry=registry)
    rows = metrics_of(config)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 6]
    assert {row["step"] for row in rows if "eval/reward" in row} == {0, 3, 6}
    assert all("reward/mean" in row and "loss" in row for row in rows[1:])
    assert finished.checkpoint.name == "final"
    manifest = latest_manifest(RunFolder(config.folder))
    assert manifest is not None
    assert (manifest.step, manifest.finished, manifest.cursor["open"]) == (6, True, [])
    ledger = check_ledger(config.folder / "journal.jsonl", config.folder)
    assert (ledger.steps, ledger.trained) == (6, 12)


async def test_a_synchronous_run_trains_only_on_what_the_newest_policy_sampled(make_config, registry, notes, service):
    service.sample_seconds, service.jitter = 0.005, True
    await run(make_config(), notes, registry=registry)
    for batch in service.batches:
        assert {t.oldest_step for group in batch.groups for t in group.trajectories} == {batch.step}


@pytest.mark.parametrize("staleness", [1, 3])
async def test_staleness_is_a_hard_bound_and_is_used(make_config, registry, notes, service, staleness):
    service.sample_seconds, service.update_seconds, service.jitter = 0.01, 0.01, True
    await run(make_config(env__max_batches_offpolicy=staleness, env__total_steps=12), notes, registry=registry)
    ages = [batch.step - group.oldest_step for batch in service.batches for group in batch.groups]
    assert max(ages) == staleness
    assert min(ages) >= 0
    assert max(row["staleness/max"] for row in notes.steps) == staleness


async def test_the_synchronous_curve_depends_on_the_seed_alone(make_config, registry, notes, service):
    curves = []
    for name, seed, jitter in (("a", 1, 0.0), ("b", 1, 0.004), ("c", 2, 0.0)):
        service.sample_seconds, service.jitter = jitter, True
        config = make_config(run__name=name, run__seed=seed)
        await run(config, notes, registry=registry)
        curves.append((timeless(metrics_of(config)), records_of(config)))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


async def test_a_group_is_sampled_in_one_request(make_config, registry, notes, service):
    await run(make_config(env__steps_per_eval=0, run__previews=0), notes, registry=registry)
    assert {n for _, n in service.requests} == {4}


async def test_equal_groups_are_replaced_and_counted(make_config, registry, notes, service):
    service.digits = 2  # one of two digits is right: an eighth of the groups of 4 is equal
    config = make_config(env__total_steps=10)
    await run(config, notes, registry=registry)
    assert sum(row.get("groups/discarded/equal_scores", 0) for row in metrics_of(config)) > 0
    assert all(len(set(group.scores)) > 1 for batch in service.batches for group in batch.groups)
    assert {record["reason"] for record in records_of(config)} == {"", "equal_scores"}
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_run_with_nothing_to_learn_from_stops_and_says_why(make_config, registry, notes, service):
    service.digits = 1  # always 0, always right
    with pytest.raises(FilteredOut, match=r"\d groups in a row had equal scores .*always earns the reward"):
        await run(make_config(rollout__max_filtered_groups=3), notes, registry=registry)
    service.digits = 1
    config = make_config(run__name="kept", env__ensure_scores_are_not_same=False)
    await run(config, notes, registry=registry)
    assert metrics_of(config)[-1]["reward/mean"] == 1.0


def flaky(failing: set[int]) -> EnvironmentSpec:
    """A single-turn environment whose reward fails at the given calls."""
    calls = 0

    def reward(completion, task):
        nonlocal calls
        calls += 1
        if calls in failing or -1 in failing:
            raise OSError("the judge is away")
        return len(set(completion.text)) and int(completion.text) / 10

    return single_turn("flaky", lambda split: [Task(f"{n}:") for n in range(20)] if split == "train" else [], reward)


async def test_one_failed_episode_is_tried_again_and_counted(make_config, registry, notes, service):
    registry.add("env", flaky({3}))
    config = make_config(run__env="flaky")
    await run(config, notes, registry=registry)
    assert metrics_of(config)[0]["step"] == 0
    assert sum(row.get("episodes/failed/OSError", 0) for row in metrics_of(config)) == 1
    assert all(len(group.trajectories) == 4 for batch in service.batches for group in batch.groups)


async def test_a_group_may_be_completed_with_fewer_or_dropped(make_config, registry, notes, service):
    registry.add("env", flaky({3}))
    config = make_config(run__env="flaky", rollout__episode_retries=0, rollout__min_group_size=3)
    await run(config, notes, registry=registry)
    assert sorted(len(group.trajectories) for batch in service.batches for group in batch.groups)[:2] == [3, 4]
    registry.add("env", flaky({3}))
    config = make_config(run__env="flaky", rollout__episode_retries=0, run__name="dropped")
    await run(config, notes, registry=registry)
    assert sum(row.get("groups/discarded/failed", 0) for row in metrics_of(config)) == 1
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_run_whose_every_episode_fails_ends_with_the_cause(make_config, registry, notes):
    registry.add("env", flaky({-1}))
    with pytest.raises(EpisodesFailed, match=r"\d groups in a row failed .*the judge is away"):
        await run(make_config(run__env="flaky", rollout__max_failed_groups=4), notes, registry=registry)


async def test_an_endless_episode_is_cut_off_by_its_time_limit(make_config, registry, notes):
    async def reward(completion, task):
        await asyncio.sleep(3600)

    registry.add("env", single_turn("endless", lambda split: [Task("x")] if split == "train" else [], reward))
    config = make_config(run__env="endless", rollout__episode_timeout=0.02, rollout__max_failed_groups=2)
    with pytest.raises(EpisodesFailed, match=r"no end within 0\.02 s \(rollout\.episode_timeout\)"):
        await run(config, notes, registry=registry)


async def test_the_sampler_may_fail_for_a_while(make_config, registry, notes, service):
    def away(count):
        if 10 <= count < 13:
            raise PolicyUnavailable("503")

    service.on_sample = away
    config = make_config()
    await run(config, notes, registry=registry)
    assert sum(row.get("episodes/failed/PolicyUnavailable", 0) for row in metrics_of(config)) > 0


async def test_a_trainer_that_gives_up_ends_the_run_with_its_cause(make_config, registry, notes, service):
    def fail(step):
        if step == 3:
            raise TrainerError("the account is out of credit")

    service.on_update = fail
    with pytest.raises(TrainerError, match="out of credit"):
        await run(make_config(env__max_batches_offpolicy=2), notes, registry=registry)


@pytest.mark.parametrize("died_after", [2, 3, 5])
async def test_a_resumed_run_equals_an_uninterrupted_one(make_config, registry, notes, service, died_after):
    whole = make_config(run__name="whole")
    await run(whole, notes, registry=registry)

    def die(step):
        if step == died_after:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    config = make_config(run__name="again")
    with pytest.raises(Killed):
        await run(config, notes, registry=registry)
    await run(config, notes, registry=registry, resume=True)
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole))
    assert records_of(config) == records_of(whole)
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_with_overlap_a_resumed_run_loses_and_doubles_nothing(make_config, registry, notes, service):
    service.sample_seconds, service.update_seconds, service.jitter = 0.01, 0.01, True
    config = make_config(env__max_batches_offpolicy=2, env__total_steps=14, trainer__save_checkpoint_interval=3)
    for death in (5, 10):

        def die(step, death=death):
            if step == death:
                raise Killed

        service.on_update = die
        with pytest.raises(Killed):
            await run(config, notes, registry=registry, resume=death > 5)
    service.on_update = lambda step: None
    await run(config, notes, registry=registry, resume=True)
    ledger = check_ledger(config.folder / "journal.jsonl", config.folder)
    assert (ledger.steps, ledger.models) == (14, ("m0", "m1", "m2"))
    assert (config.folder / "dead" / "lineage-0" / "rollouts").is_dir()
    journal = config.folder / "journal.jsonl"
    lines = journal.read_text().splitlines()
    last = max(place for place, line in enumerate(lines) if '"forward_backward"' in line)
    for plant in ("lose", "double"):
        event = json.loads(lines[last])
        event["data"] = event["data"][1:] if plant == "lose" else [*event["data"], event["data"][0]]
        journal.write_text("\n".join([*lines[:last], json.dumps(event), *lines[last + 1 :]]) + "\n")
        with pytest.raises(LedgerViolated):
            check_ledger(journal, config.folder)


async def test_a_lost_reply_of_an_update_rewinds_to_the_last_manifest(make_config, registry, notes, service):
    def lose(step):
        if step == 5 and service.trainers == 1:
            raise UpdateUncertain("the reply to optimiser step 6 was lost")

    service.on_update = lose
    config = make_config()
    await run(config, notes, registry=registry)
    assert service.trainers == 2
    assert any("Rewinding to step 4" in text for text in notes.said)
    assert [row["step"] for row in metrics_of(config)] == [0, 1, 2, 3, 4, 5, 6]
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_reply_lost_each_time_ends_the_run(make_config, registry, notes, service):
    def lose(step):
        raise UpdateUncertain("the reply was lost")

    service.on_update = lose
    with pytest.raises(UpdateUncertain):
        await run(make_config(), notes, registry=registry)
    assert service.trainers == 4


async def test_a_stop_saves_a_checkpoint_and_is_no_success(make_config, registry, notes, service):
    stop = asyncio.Event()
    service.on_update = lambda step: stop.set() if step == 2 else None
    config = make_config(env__max_batches_offpolicy=1, trainer__save_checkpoint_interval=0)
    with pytest.raises(Stopped, match=r"stopped at step 3 of 6.*--resume --name small"):
        await run(config, notes, registry=registry, stop=stop)
    manifest = latest_manifest(RunFolder(config.folder))
    assert manifest is not None
    assert (manifest.step, manifest.finished) == (3, False)
    service.on_update = lambda step: None
    finished = await run(config, notes, registry=registry, resume=True)
    assert finished.steps == 6
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_stop_is_heard_while_waiting_for_slow_samples(make_config, registry, notes, service):
    stop = asyncio.Event()

    def slow(count):
        if service.batches:
            service.sample_seconds = 3600.0
            asyncio.get_running_loop().call_later(0.02, stop.set)

    service.on_sample = slow
    config = make_config(env__steps_per_eval=0, run__previews=0)
    with pytest.raises(Stopped):
        await asyncio.wait_for(run(config, notes, registry=registry, stop=stop), 30)
    manifest = latest_manifest(RunFolder(config.folder))
    assert manifest is not None
    assert manifest.step == len(service.batches)


async def test_a_finished_run_can_be_resumed_to_more_steps(make_config, registry, notes, service):
    await run(make_config(), notes, registry=registry)
    longer = make_config(env__total_steps=9)
    finished = await run(longer, notes, registry=registry, resume=True)
    assert finished.steps == 9
    assert [row["step"] for row in metrics_of(longer)] == list(range(10))
    check_ledger(longer.folder / "journal.jsonl", longer.folder)
    again = await run(longer, notes, registry=registry, resume=True)
    assert again.checkpoint == finished.checkpoint


async def test_a_second_run_does_not_overwrite_the_first(make_config, registry, notes):
    await run(make_config(), notes, registry=registry)
    with pytest.raises(ConfigError, match=r"holds a run already; continue it with --resume"):
        await run(make_config(), notes, registry=registry)


async def test_a_folder_is_held_by_one_process(make_config, registry, notes, service):
    service.update_seconds = 0.05
    config = make_config()
    first = asyncio.create_task(run(config, notes, registry=registry))
    await asyncio.sleep(0.05)
    with pytest.raises(ConfigError, match="in use by another process"):
        await run(config, notes, registry=registry, resume=True)
    await first


async def test_a_resume_with_another_configuration_is_refused(make_config, registry, notes):
    await run(make_config(), notes, registry=registry)
    with pytest.raises(ConfigError, match=r"env\.group_size was 4, now 2"):
        await run(make_config(env__group_size=2), notes, registry=registry, resume=True)


async def test_a_damaged_newest_manifest_is_said_and_passed_over(make_config, registry, notes):
    config = make_config()
    await run(config, notes, registry=registry)
    newest = sorted((config.folder / "manifests").glob("*.json"))[-1]
    newest.write_text(newest.read_text()[:50])
    finished = await run(config, notes, registry=registry, resume=True)
    assert finished.steps == 6
    assert any("step-000006.json is damaged" in text for text in notes.said)
    assert "continuing small from step 4" in notes.said
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_manifest_of_a_newer_version_is_not_gone_behind(make_config, registry, notes):
    config = make_config()
    await run(config, notes, registry=registry)
    newest = sorted((config.folder / "manifests").glob("*.json"))[-1]
    newest.write_text(json.dumps(json.loads(newest.read_text()) | {"version": 99}))
    with pytest.raises(CheckpointError, match="of version 99"):
        await run(config, notes, registry=registry, resume=True)


async def test_a_death_before_the_first_manifest_begins_anew(make_config, registry, notes, service):
    def die(step):
        if step == 1:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    config = make_config()
    with pytest.raises(Killed):
        await run(config, notes, registry=registry)
    await run(config, notes, registry=registry, resume=True)
    assert [row["step"] for row in metrics_of(config)] == [0, 1, 2, 3, 4, 5, 6]
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_start_that_fails_leaves_the_name_free(make_config, registry, notes, monkeypatch):
    async def refuse(self, spec, resume):
        raise TrainerError("no such model")

    with monkeypatch.context() as patch:
        patch.setattr(type(registry.load("trainer", "fake").make(None)), "start", refuse)
        with pytest.raises(TrainerError, match="no such model"):
            await run(make_config(), notes, registry=registry)
    assert (await run(make_config(env__total_steps=2), notes, registry=registry)).steps == 2


async def test_a_policy_that_can_t_be_opened_ends_the_run(make_config, registry, notes, service):
    spec = registry.load("trainer", "fake")

    async def open_policy(ref, config):
        if ref.step == 3:
            raise PolicyUnavailable("gone")
        return await spec.open_policy(ref, config)

    registry.add("trainer", dataclasses.replace(spec, open_policy=open_policy))
    with pytest.raises(PolicyUnavailable, match="gone"):
        await asyncio.wait_for(run(make_config(), notes, registry=registry), 30)


@pytest.mark.parametrize("broken", ["raises", "nan", "hangs", "tokens", "exits", "cancels", "fewer", "policies"])
async def test_a_comparison_that_fails_drops_its_group(make_config, registry, notes, service, broken):
    spec = registry.load("env", "parity")
    calls = 0

    async def score_group(group):
        nonlocal calls
        calls += 1
        if calls % 5:
            return group
        if broken == "hangs":
            await asyncio.sleep(3600)
        if broken == "raises":
            raise ValueError("the judge is away")
        if broken == "exits":
            raise SystemExit(0)
        if broken == "cancels":
            raise asyncio.CancelledError
        if broken == "fewer":
            return dataclasses.replace(group, trajectories=group.trajectories[1:])
        first = group.trajectories[0]
        if broken == "policies":
            return dataclasses.replace(
                group, trajectories=(dataclasses.replace(first, policies=()), *group.trajectories[1:])
            )
        if broken == "tokens":
            segment = first.segments[0]
            with pytest.raises(ValueError, match="read-only"):
                segment.tokens[0] = 65
            other = dataclasses.replace(segment, tokens=segment.tokens + 1)
            first = dataclasses.replace(first, segments=(other,))
            return dataclasses.replace(group, trajectories=(first, *group.trajectories[1:]))
        bad = dataclasses.replace(group.trajectories[0], rewards=(float("nan"),))
        return dataclasses.replace(group, trajectories=(bad, *group.trajectories[1:]))

    def make(config):
        environment = spec.make(config)
        environment.score_group = score_group
        return environment

    registry.add("env", dataclasses.replace(spec, make=make))
    config = make_config(rollout__episode_retries=0, rollout__episode_timeout=0.5)
    assert (await run(config, notes, registry=registry)).steps == 6
    assert sum(row.get("groups/discarded/failed", 0) for row in metrics_of(config)) > 0
    check_ledger(config.folder / "journal.jsonl", config.folder)


@pytest.mark.parametrize("leave", [SystemExit(0), GeneratorExit(), asyncio.CancelledError()])
async def test_an_episode_that_leaves_the_program_is_a_failed_episode(make_config, registry, notes, service, leave):
    calls = 0

    class Leaver:
        def tasks(self, split):
            return 8 if split == "train" else 0

        async def episode(self, task):
            return self

        async def reset(self):
            return Step("go:")

        async def step(self, completion):
            nonlocal calls
            calls += 1
            if calls == 5:
                raise leave
            return Step(reward=int(completion.text) / 10, terminated=True)

        async def close(self):
            pass

    registry.add("env", EnvironmentSpec("leaver", make=lambda config: Leaver()))
    config = make_config(run__env="leaver")
    assert (await run(config, notes, registry=registry)).steps == 6
    assert sum(row.get(f"episodes/failed/{type(leave).__name__}", 0) for row in metrics_of(config)) == 1


async def test_one_that_hangs_at_its_start_takes_no_other_with_it(make_config, registry, notes, service):
    hung = False

    class Slow:
        def tasks(self, split):
            return 8 if split == "train" else 0

        async def episode(self, task):
            return self

        async def reset(self):
            nonlocal hung
            if not hung:
                hung = True
                await asyncio.sleep(3600)
            return Step("go:")

        async def step(self, completion):
            return Step(reward=int(completion.text) / 10, terminated=True)

        async def close(self):
            pass

    registry.add("env", EnvironmentSpec("slow", make=lambda config: Slow()))
    config = make_config(
        run__env="slow", rollout__episode_timeout=0.4, rollout__episode_retries=0, rollout__min_group_size=3
    )
    assert (await run(config, notes, registry=registry)).steps == 6
    assert sorted(len(group.trajectories) for batch in service.batches for group in batch.groups)[:2] == [3, 4]


async def test_code_that_holds_up_the_loop_is_named(make_config, registry, notes, service, monkeypatch):
    monkeypatch.setattr("tinker_atropos.supervise.STALL_SECONDS", 0.4)
    service.on_sample = lambda count: time.sleep(1.5) if count == 3 else None
    await run(make_config(env__total_steps=1, env__steps_per_eval=0), notes, registry=registry)
    assert any(text.startswith("still ") for text in notes.said)


@pytest.mark.parametrize("damage", ["metrics", "lineage", "strange rollouts", "no folders"])
async def test_a_damaged_run_folder_still_resumes(make_config, registry, notes, service, damage):
    def die(step):
        if step == 5:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    config = make_config()
    with pytest.raises(Killed):
        await run(config, notes, registry=registry)
    if damage == "metrics":
        with (config.folder / "metrics.jsonl").open("ab") as file:
            file.write(b'\xff\xfe\n7\n{"no": "step"}\n{"step": "four"}\n{"step": 4, "half')
    elif damage == "lineage":
        (config.folder / "lineage").write_text("many")
    elif damage == "strange rollouts":
        (config.folder / "rollouts" / "step-xx.jsonl.gz").write_bytes(b"?")
        (config.folder / "rollouts" / ".step-000009.jsonl.gz.1.part").write_bytes(b"?")
    else:
        (config.folder / "evaluations").rename(config.folder / "moved")
    await run(config, notes, registry=registry, resume=True)
    assert [row["step"] for row in metrics_of(config)] == [0, 1, 2, 3, 4, 5, 6]
    assert {path.name for path in (config.folder / "dead").iterdir()} >= {"lineage-0"}
    if damage != "strange rollouts":
        check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_finished_run_is_not_started_again(make_config, registry, notes, service):
    finished = await run(make_config(), notes, registry=registry)
    again = await run(make_config(), notes, registry=registry, resume=True)
    assert again == finished
    assert service.trainers == 1


async def test_a_failed_evaluation_costs_no_step(make_config, registry, notes, service):
    def away(count):
        if service.batches and len(service.batches) == 3:
            raise PolicyUnavailable("503")

    service.on_sample = away
    config = make_config(env__total_steps=3, rollout__max_failed_groups=1000)
    finished = await run(config, notes, registry=registry)
    assert finished.steps == 3
    assert metrics_of(config)[-1]["step"] == 3
    assert any(text.startswith("no evaluation at step 3") for text in notes.said)


async def test_what_was_filtered_can_be_looked_at_after_the_run_gave_up(make_config, registry, notes, service):
    service.digits = 1
    config = make_config(rollout__max_filtered_groups=3)
    with pytest.raises(FilteredOut):
        await run(config, notes, registry=registry)
    left = list(read_records(config.folder / "rollouts" / "stopped-0.jsonl.gz"))
    assert {record["reason"] for record in left} == {"equal_scores"}
    assert left[0]["trajectories"][0]["messages"]


async def test_a_run_that_only_lacks_its_end_gets_it(make_config, registry, notes):
    await run(make_config(), notes, registry=registry)
    newest = sorted(make_config().folder.joinpath("manifests").glob("*.json"))[-1]
    newest.unlink()
    shorter = make_config(env__total_steps=4)
    finished = await run(shorter, notes, registry=registry, resume=True)
    assert (finished.steps, finished.checkpoint.name) == (4, "final")
    manifest = latest_manifest(RunFolder(shorter.folder))
    assert manifest is not None
    assert manifest.finished
    assert len(manifest.consumed) == 4
    with pytest.raises(ConfigError, match="less than the 4 steps"):
        await run(make_config(env__total_steps=3), notes, registry=registry, resume=True)


async def test_the_curve_counts_filtered_groups_and_says_what_was_trained(make_config, registry, notes, service):
    service.digits = 2
    config = make_config(env__total_steps=10)
    await run(config, notes, registry=registry)
    rows = metrics_of(config)[1:]
    assert all(row["tokens/sampled"] >= row["tokens/trained"] for row in rows)
    assert any(row["reward/mean"] != row["reward/trained_mean"] for row in rows)
    assert sum(row["episodes/ended"] for row in rows) == 4 * sum(
        row["groups/trained"] + row.get("groups/discarded/equal_scores", 0) for row in rows
    )


async def test_an_environment_without_training_tasks_is_refused_before_anything_starts(
    make_config, registry, notes, service
):
    registry.add("env", single_turn("empty", lambda split: [], lambda completion, task: 0))
    with pytest.raises(DataError, match="no tasks in split 'train'"):
        await run(make_config(run__env="empty"), notes, registry=registry)
    assert service.trainers == 0


async def test_many_turns_grow_one_trajectory(make_config, registry, notes, service):
    class Countdown:
        def tasks(self, split):
            return None if split == "train" else 0

        async def episode(self, task):
            return CountdownEpisode()

    class CountdownEpisode:
        def __init__(self):
            self.turns = 0

        async def reset(self):
            return Step("go:")

        async def step(self, completion):
            self.turns += 1
            return Step("on:", reward=int(completion.text) / 10, terminated=self.turns == 3)

        async def close(self):
            pass

    registry.add("env", EnvironmentSpec("countdown", make=lambda config: Countdown()))
    await run(make_config(run__env="countdown"), notes, registry=registry)
    trajectory = service.batches[0].groups[0].trajectories[0]
    assert len(trajectory.rewards) == 3
    assert trajectory.segments[0].mask.sum() == 6


async def test_a_full_context_ends_an_episode_or_drops_it(make_config, registry, notes, service):
    class Talker:
        def tasks(self, split):
            return 3 if split == "train" else 0

        async def episode(self, task):
            return self

        async def reset(self):
            return Step("go:")

        async def step(self, completion):
            return Step("and another thing:", reward=int(completion.text) / 10)

        async def close(self):
            pass

    registry.add("env", EnvironmentSpec("talker", make=lambda config: Talker()))
    config = make_config(run__env="talker", env__max_token_length=60)
    await run(config, notes, registry=registry)
    assert all(t.truncated for batch in service.batches for g in batch.groups for t in g.trajectories)
    dropping = make_config(
        run__env="talker", env__max_token_length=60, rollout__context_overflow="drop", run__name="dropping"
    )
    with pytest.raises(EpisodesFailed, match="ContextOverflow"):
        await run(dropping, notes, registry=registry)


async def test_policies_nobody_needs_are_released(make_config, registry, notes, service):
    service.sample_seconds = 0.002
    await run(make_config(env__max_batches_offpolicy=2), notes, registry=registry)
    steps = [ref.step for ref in service.released]
    assert steps == sorted(steps)
    assert set(range(5)) <= set(steps) | {0}
    assert len(steps) == len(set(steps))


async def test_a_silent_stage_is_named(make_config, registry, notes, service, monkeypatch):
    monkeypatch.setattr("tinker_atropos.supervise.STALL_SECONDS", 1.0)
    service.update_seconds = 2.5
    await run(make_config(env__total_steps=1), notes, registry=registry)
    assert any(text.startswith("still training, for") for text in notes.said)


async def test_a_failing_listener_harms_nobody(make_config, registry, notes):
    class Listener:
        from tinker_atropos import hookimpl

        @hookimpl
        def on_metrics(self, step, metrics):
            raise RuntimeError("disk of the dashboard is full")

    registry._hooks.register(Listener(), "listener")
    await run(make_config(), notes, registry=registry)
    assert any("disk of the dashboard" in text for text in notes.said)


async def test_rollouts_read_back_as_they_were(make_config, registry, notes, service):
    from tinker_atropos.rollout.records import read_group

    config = make_config()
    await run(config, notes, registry=registry)
    record = next(read_records(config.folder / "rollouts" / "step-000001.jsonl.gz"))
    group = service.batches[0].groups[0]
    again = read_group(record)
    assert (again.id, again.task, again.scores) == (group.id, group.task, group.scores)
    for one, other in zip(again.trajectories, group.trajectories, strict=True):
        assert one.segments[0].tokens.tobytes() == other.segments[0].tokens.tobytes()
        assert one.segments[0].logprobs.tobytes() == other.segments[0].logprobs.tobytes()


async def test_a_run_that_must_give_up_keeps_what_it_learned(make_config, registry, notes, service):
    def narrow(step):
        if step == 2:
            service.digits = 1  # from now on every group is equal

    service.on_update = narrow
    config = make_config(rollout__max_filtered_groups=3, trainer__save_checkpoint_interval=0)
    with pytest.raises(FilteredOut):
        await run(config, notes, registry=registry)
    manifest = latest_manifest(RunFolder(config.folder))
    assert manifest is not None
    assert manifest.step == len(service.batches) == 3
