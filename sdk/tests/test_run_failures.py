"""What a run does when something in it fails: episodes, samplers, trainers, listeners."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import pytest
from tinker_atropos import (
    DataError,
    EnvironmentSpec,
    EpisodesFailed,
    FilteredOut,
    PolicyUnavailable,
    Step,
    Task,
    TrainerError,
    single_turn,
)
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run import run
from tinker_atropos.testing import check_ledger

from .run_records import flaky, metrics_of


async def test_a_run_with_nothing_to_learn_from_stops_and_says_why(make_config, registry, notes, service):
    service.digits = 1  # always 0, always right
    with pytest.raises(FilteredOut, match=r"\d groups in a row had equal scores .*always earns the reward"):
        await run(make_config(rollout__max_filtered_groups=3), notes, registry=registry)
    service.digits = 1
    config = make_config(run__name="kept", env__ensure_scores_are_not_same=False)
    await run(config, notes, registry=registry)
    assert metrics_of(config)[-1]["reward/mean"] == 1.0


async def test_one_failed_episode_is_tried_again_and_counted(make_config, registry, notes, service):
    registry.add("env", flaky({3}))
    config = make_config(run__env="flaky")
    await run(config, notes, registry=registry)
    assert metrics_of(config)[0]["step"] == 0
    assert sum(row.get("episodes/failed/OSError", 0) for row in metrics_of(config)) == 1
    assert all(len(group.trajectories) == 4 for batch in service.batches for group in batch.groups)


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


async def test_an_environment_without_training_tasks_is_refused_before_anything_starts(
    make_config, registry, notes, service
):
    registry.add("env", single_turn("empty", lambda split: [], lambda completion, task: 0))
    with pytest.raises(DataError, match="no tasks in split 'train'"):
        await run(make_config(run__env="empty"), notes, registry=registry)
    assert service.trainers == 0


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
