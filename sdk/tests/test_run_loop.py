"""The run loop with a fake trainer: steps, staleness, filtering, curves, rollouts."""

from __future__ import annotations

import pytest
from tinker_atropos import (
    EnvironmentSpec,
    EpisodesFailed,
    Step,
)
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run import run
from tinker_atropos.run_folder import RunFolder, latest_manifest
from tinker_atropos.testing import check_ledger

from .run_records import flaky, metrics_of, records_of, timeless


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
