"""Where a run stops and goes on: checkpoints, resume, rewind, stop, damaged folders."""

from __future__ import annotations

import asyncio
import json

import pytest
from tinker_atropos import (
    CheckpointError,
    ConfigError,
    FilteredOut,
    UpdateUncertain,
)
from tinker_atropos.run import Stopped, run
from tinker_atropos.run_folder import RunFolder, latest_manifest
from tinker_atropos.testing import LedgerViolated, check_ledger

from .run_records import Killed, metrics_of, records_of, timeless


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
