"""What an environment learns: told of what ended, kept in checkpoints, the same after a resume, a rewind, a kill."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tinker_atropos import (
    CheckpointError,
    EnvironmentSpec,
    FilteredOut,
    PluginError,
    Task,
    UpdateUncertain,
    single_turn,
)
from tinker_atropos.environment import SingleTurnEnvironment
from tinker_atropos.run import run

from .run_records import Killed, metrics_of, records_of, timeless

TASKS = 12


class Counting(SingleTurnEnvironment):
    """Counts the episodes of each task, and skips a task once it has had enough of them (but for every other turn)."""

    enough = 1e9
    made: list[Counting] = []  # noqa: RUF012

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.counts: dict[str, int] = {}
        self.order: list[str] = []
        Counting.made.append(self)

    def ended(self, groups: Any) -> None:
        self.order += [group.id for group in groups]
        for group in groups:
            index = str(group.task.index)
            self.counts[index] = self.counts.get(index, 0) + len(group.trajectories)

    def snapshot(self) -> dict[str, Any]:
        return {"counts": dict(sorted(self.counts.items()))}

    def restore(self, state: Any) -> None:
        self.counts = dict(state["counts"])

    def skip(self, task: Any) -> str:
        enough = self.counts.get(str(task.index), 0) >= self.enough
        return "counted" if enough and task.seed % 2 else ""


def counting(cls: type[Counting] = Counting) -> EnvironmentSpec:
    def reward(completion: Any, task: Any) -> float:
        return int(completion.text or 0) / 10

    def tasks(split: str) -> list[Task]:
        return [Task(f"{n}:") for n in range(TASKS)] if split == "train" else []

    plain = single_turn("counting", tasks, reward)

    def make(config: Any) -> Counting:
        return cls("counting", tasks, {"reward": reward}, {"reward": 1.0}, prompt_format="completion")

    return EnvironmentSpec(name="counting", make=make, config=plain.config)


def kept(config: Any) -> dict[str, Any]:
    folder = config.folder / "manifests"
    return {path.name: json.loads(path.read_text()) for path in sorted(folder.glob("environment-*.json"))}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counting, "made", [])
    monkeypatch.setattr(Counting, "enough", 1e9)


@pytest.mark.parametrize(("died_after", "enough"), [(2, 1e9), (3, 4), (5, 4)])
async def test_what_was_learned_is_the_same_after_a_kill(
    make_config, registry, notes, service, monkeypatch, died_after, enough
):
    monkeypatch.setattr(Counting, "enough", enough)
    registry.add("env", counting())
    settings = {"run__env": "counting", "env__total_steps": 12}
    whole = make_config(run__name="whole", **settings)
    await run(whole, notes, registry=registry)

    def die(step):
        if step == died_after:
            service.on_update = lambda step: None
            raise Killed

    service.on_update = die
    config = make_config(run__name="again", **settings)
    with pytest.raises(Killed):
        await run(config, notes, registry=registry)
    await run(config, notes, registry=registry, resume=True)
    assert kept(config) == kept(whole)
    assert list(kept(whole)) == [f"environment-{step:06d}.json" for step in range(2, 13, 2)]
    assert timeless(metrics_of(config)) == timeless(metrics_of(whole))
    assert records_of(config) == records_of(whole)
    skipped = sum(row.get("groups/discarded/counted", 0) for row in metrics_of(whole))
    assert (skipped > 0) == (enough < 1e9)


async def test_a_snapshot_counts_what_ended_and_nothing_under_way(make_config, registry, notes):
    registry.add("env", counting())
    config = make_config(run__env="counting", env__max_batches_offpolicy=2)
    await run(config, notes, registry=registry)
    rows = {row["step"]: row for row in metrics_of(config)}
    for step in (2, 4, 6):
        ended = sum(rows[n]["episodes/ended"] for n in range(1, step + 1))
        assert sum(kept(config)[f"environment-{step:06d}.json"]["counts"].values()) == ended
    ordinals = [int(id.partition("-")[2]) for id in Counting.made[-1].order]
    assert len(ordinals) == len(set(ordinals))


async def test_a_rewind_takes_back_what_was_learned(make_config, registry, notes, service):
    def lose(step):
        if step == 1 and service.trainers == 1:  # before any manifest: back to the beginning
            raise UpdateUncertain("the reply to optimiser step 2 was lost")

    service.on_update = lose
    registry.add("env", counting())
    config, plain = make_config(run__env="counting"), make_config(run__env="counting", run__name="plain")
    await run(config, notes, registry=registry)
    service.on_update = lambda step: None
    await run(plain, notes, registry=registry)
    assert any("Rewinding to step 0" in text for text in notes.said)
    assert kept(config) == kept(plain)


async def test_a_snapshot_that_is_gone_or_damaged_is_named(make_config, registry, notes):
    registry.add("env", counting())
    config = make_config(run__env="counting", env__total_steps=2)
    await run(config, notes, registry=registry)
    path = config.folder / "manifests" / "environment-000002.json"
    more = make_config(run__env="counting", env__total_steps=4)
    path.write_text("{")
    with pytest.raises(CheckpointError, match=r"environment-000002\.json, what environment 'counting' had learned"):
        await run(more, notes, registry=registry, resume=True)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"environment-000002\.json, what environment 'counting' had learned"):
        await run(more, notes, registry=registry, resume=True)


async def test_an_environment_that_skips_everything_ends_the_run_with_the_reasons(make_config, registry, notes):
    class Never(Counting):
        def skip(self, task):
            return "no_use"

    registry.add("env", counting(Never))
    with pytest.raises(FilteredOut, match=r"skips every task \(no_use: \d+\)"):
        await run(make_config(run__env="counting"), notes, registry=registry)


@pytest.mark.parametrize(
    ("method", "value", "said"),
    [
        ("snapshot", lambda self: {"counts": {1, 2}}, r"snapshot\(\) of environment 'counting' must return what JSON"),
        ("restore", None, r"has snapshot\(\) and no restore\(\)"),
        ("ended", lambda self, groups: 1 / 0, r"ended\(\) of environment 'counting' failed: ZeroDivisionError"),
        ("skip", lambda self, task: True, r"skip\(\) of the environment returned True"),
    ],
)
async def test_a_broken_method_is_named(make_config, registry, notes, method, value, said):
    registry.add("env", counting(type("Broken", (Counting,), {method: value})))
    with pytest.raises(PluginError, match=said):
        await run(make_config(run__env="counting"), notes, registry=registry)


async def test_an_environment_that_learns_nothing_leaves_nothing(make_config, registry, notes):
    config = make_config()
    await run(config, notes, registry=registry)
    assert kept(config) == {}
