"""A run on an environment that drives itself: what it hands in is trained on once, or ends with a reason."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import (
    EnvironmentConfig,
    EnvironmentSpec,
    Group,
    Segment,
    TaskRef,
    Trajectory,
    UpdateUncertain,
)
from tinker_atropos.config import Config, load
from tinker_atropos.errors import ConfigError, EpisodesFailed, FilteredOut, PluginError, RunError
from tinker_atropos.external import EndpointSettings, GroupSink, PolicySource
from tinker_atropos.registry import Registry
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run import run
from tinker_atropos.run_folder import RunFolder
from tinker_atropos.state import MemoryState
from tinker_atropos.testing import check_ledger
from tinker_atropos.trajectory import SamplingParams

from .conftest import FakeService, Notes

Making = Callable[["FakeEndpoint", GroupSink], Any]


class FakeEndpoint:
    """In place of HTTP: the source of policies itself."""

    url, token, context_length = "http://127.0.0.1:1/v1", None, 64

    def __init__(self, source: PolicySource, settings: EndpointSettings) -> None:
        self.source, self.model = source, settings.model

    async def ready(self) -> None:
        pass

    def seen(self) -> dict[str, int]:
        return {"answered": 3}


@asynccontextmanager
async def fake_endpoint(config: Any, source: PolicySource, settings: EndpointSettings) -> AsyncIterator[FakeEndpoint]:
    yield FakeEndpoint(source, settings)


class Script:
    """An environment that drives itself, as a foreign script would."""

    def __init__(self, making: Making) -> None:
        self.making = making

    async def run(self, endpoint: Any, sink: GroupSink) -> None:
        await self.making(endpoint, sink)


class Kept(MemoryState[Group]):
    """Outlives a run, as a state on a server does."""

    durable = True

    async def close(self) -> None:
        pass


class ScriptConfig(EnvironmentConfig):
    scripts: tuple[str, ...] = ()


@pytest.fixture
def start(registry: Registry, service: FakeService, tmp_path: Path, notes: Notes) -> Callable[..., Any]:
    """Return `start(making, resume=False, **changes)`, which runs to the end."""
    adapter = registry.load("adapter", "fake_sessions")
    registry.add("adapter", replace(adapter, endpoint=fake_endpoint))

    async def go(making: Making, resume: bool = False, **changes: Any) -> Any:
        spec = EnvironmentSpec(
            "script",
            make=lambda config: Script(making),
            kind="external",
            config=ScriptConfig,
            reference=lambda rests: {"scripts": tuple(rests)},
        )
        registry.add("env", spec)
        return await run(make_config(registry, tmp_path, **changes), notes, resume=resume, registry=registry)

    return go


def make_config(registry: Registry, tmp_path: Path, **changes: Any) -> Config:
    settings = {
        "run.env": "script:a.py",
        "run.trainer": "fake",
        "run.name": "own",
        "run.output": str(tmp_path / "runs"),
        "rollout.adapter": "fake_sessions",
        "env.group_size": 4,
        "env.batch_size": 8,
        "env.total_steps": 4,
        "env.max_batches_offpolicy": 1,
        "trainer.save_checkpoint_interval": 2,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    return load(None, [(key, value, key) for key, value in settings.items()], registry=registry)


async def sample_group(endpoint: FakeEndpoint, id: str, size: int = 4, score: Callable[[int], float] = float) -> Group:
    async with endpoint.source.use() as policy:
        prompt = np.array([ord(letter) for letter in id], np.int32)
        samples = await policy.sample(prompt, SamplingParams(4, seed=abs(hash(id)) % 1000), size)
    trajectories = []
    for place, sample in enumerate(samples):
        tokens = np.concatenate([prompt, sample.tokens])
        mask = np.arange(len(tokens)) >= len(prompt)
        logprobs = np.where(mask, np.concatenate([np.zeros(len(prompt)), sample.logprobs]), 0).astype(np.float32)
        trajectories.append(
            Trajectory(
                (Segment(tokens, logprobs, mask),), (score(place),), (sample.stop_reason,), (sample.ref,), messages=()
            )
        )
    return Group(id, TaskRef("train", 0, 0), tuple(trajectories))


async def forever(endpoint: FakeEndpoint, sink: GroupSink, size: int = 4, prefix: str = "g") -> None:
    number = 0
    while True:
        number += 1
        await sink.put(await sample_group(endpoint, f"{prefix}{sink.info.starting_step}.{number}", size))


async def test_groups_of_an_environment_that_drives_itself_are_trained_on(
    start: Callable[..., Any], service: FakeService, tmp_path: Path
) -> None:
    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        assert (sink.info.batch_size, sink.info.max_token_length, endpoint.context_length) == (8, 512, 64)
        sink.metrics({"accuracy": 0.5, "broken": float("nan")})
        await forever(endpoint, sink)

    finished = await start(making)
    assert finished.steps == 4
    assert [len(batch.groups) for batch in service.batches] == [2, 2, 2, 2]
    numbers = [int(group.id.partition(".")[2]) for batch in service.batches for group in batch.groups]
    assert numbers == sorted(numbers), "first in, first out"
    check_ledger(tmp_path / "runs/own/journal.jsonl", tmp_path / "runs/own")
    assert '"endpoint/answered": 3.0' in (tmp_path / "runs/own/metrics.jsonl").read_text()
    assert '"env/accuracy": 0.5' in (tmp_path / "runs/own/metrics.jsonl").read_text()
    assert "broken" not in (tmp_path / "runs/own/metrics.jsonl").read_text()


@pytest.mark.parametrize("size", [1, 3, 8, 20])
async def test_groups_of_any_size_fill_batches(
    start: Callable[..., Any], service: FakeService, size: int, tmp_path: Path
) -> None:
    changes = {"env__ensure_scores_are_not_same": False} if size == 1 else {}
    await start(lambda endpoint, sink: forever(endpoint, sink, size), **changes)
    trajectories = [sum(len(group.trajectories) for group in batch.groups) for batch in service.batches]
    assert all(8 <= number < 8 + size for number in trajectories)
    check_ledger(tmp_path / "runs/own/journal.jsonl", tmp_path / "runs/own")


async def test_what_was_handed_in_before_a_rewind_is_trained_on_after_it(
    start: Callable[..., Any], service: FakeService, tmp_path: Path
) -> None:
    handed: list[str] = []

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        number = 0
        while True:
            number += 1
            id = f"g{service.trainers}.{number}"
            answer = await sink.put(await sample_group(endpoint, id))
            assert answer == "accepted"
            handed.append(id)

    failed: list[int] = []

    def lose_a_reply(step: int) -> None:
        if step == 3 and not failed:
            failed.append(step)
            raise UpdateUncertain("the reply was lost")

    service.on_update = lose_a_reply
    await start(making, env__max_batches_offpolicy=3, env__total_steps=6)
    folder = tmp_path / "runs/own"
    check_ledger(folder / "journal.jsonl", folder)
    ended = Counter(record["group"] for path in sorted(folder.glob("rollouts/*.gz")) for record in read_records(path))
    assert set(handed) <= set(ended), "every group that was accepted has ended"
    assert max(ended.values()) == 1


async def test_groups_that_are_refused_or_equal_end_with_their_reason(
    start: Callable[..., Any], tmp_path: Path
) -> None:
    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        await sink.discard(await sample_group(endpoint, "bad"), "unproven")
        await sink.put(await sample_group(endpoint, "even", score=lambda place: 1.0))
        await forever(endpoint, sink)

    await start(making)
    folder = tmp_path / "runs/own"
    records = [record for path in folder.glob("rollouts/step-*.gz") for record in read_records(path)]
    reasons = {record["group"]: record["reason"] for record in records if record["outcome"] == "discarded"}
    assert {group: reason for group, reason in reasons.items() if reason != "stale"} == {
        "bad": "unproven",
        "even": "equal_scores",
    }
    check_ledger(folder / "journal.jsonl", folder)


async def test_a_run_of_nothing_but_refused_or_equal_groups_ends_and_says_why(start: Callable[..., Any]) -> None:
    async def refused(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        for number in range(1000):
            await sink.discard(await sample_group(endpoint, f"bad{number}"), "unproven")

    async def equal(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        for number in range(1000):
            await sink.put(await sample_group(endpoint, f"even{number}", score=lambda place: 0.0))

    with pytest.raises(EpisodesFailed, match=r"5 groups in a row can't be trained on \(the last: unproven\)"):
        await start(refused, rollout__max_failed_groups=5)
    with pytest.raises(FilteredOut, match="7 groups in a row had equal scores"):
        await start(equal, rollout__max_filtered_groups=7, run__name="other")


@pytest.mark.parametrize(("equal", "interval"), [(0.8, 4), (0.94, 2), (0.5, 0)])
async def test_discarded_groups_never_fill_the_state(
    start: Callable[..., Any], tmp_path: Path, equal: float, interval: int
) -> None:
    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        rng = np.random.default_rng(0)
        number = 0
        while True:
            number += 1
            score = (lambda place: 1.0) if rng.random() < equal else float
            await sink.put(await sample_group(endpoint, f"g{number}", 2, score=score))

    await start(
        making,
        env__group_size=2,
        env__total_steps=12,
        trainer__save_checkpoint_interval=interval,
        rollout__max_filtered_groups=1000,
        env__max_batches_offpolicy=3,
    )
    check_ledger(tmp_path / "runs/own/journal.jsonl", tmp_path / "runs/own")


async def test_what_ended_a_run_does_not_end_the_resumed_one(start: Callable[..., Any], tmp_path: Path) -> None:
    kept = Kept(1000)

    async def refused(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        for number in range(12):
            await sink.discard(await sample_group(endpoint, f"bad{number}"), "unproven")
        await asyncio.Event().wait()

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        sink_state.append(sink)
        await (refused if len(sink_state) == 1 else forever)(endpoint, sink)

    sink_state: list[GroupSink] = []
    mended = pytest.MonkeyPatch()
    mended.setattr("tinker_atropos.rollout.external.ExternalProduction.state", lambda self: kept)
    try:
        with pytest.raises(EpisodesFailed):
            await start(making, rollout__max_failed_groups=10)
        await start(making, resume=True, rollout__max_failed_groups=10)
    finally:
        mended.undo()
    manifests = RunFolder(tmp_path / "runs/own").manifests()
    assert sum(len(manifest.discarded) for manifest in manifests) >= 10
    check_ledger(tmp_path / "runs/own/journal.jsonl", tmp_path / "runs/own")


async def test_the_same_group_twice_counts_once_and_a_full_queue_blocks(
    start: Callable[..., Any], service: FakeService
) -> None:
    seen: list[str] = []
    service.update_seconds = 0.5  # the queue fills while the trainer is busy

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        if not seen:
            group = await sample_group(endpoint, "one")
            seen.extend([await sink.put(group), await sink.put(group)])
            while (answer := await sink.put(await sample_group(endpoint, f"n{len(seen)}"), wait=0.01)) == "accepted":
                seen.append(answer)
            seen.append(answer)
        await forever(endpoint, sink)

    await start(making)
    assert seen[:2] == ["accepted", "duplicate"]
    assert seen[-1] == "blocked"


async def test_groups_that_no_trainer_could_take_are_refused_at_the_border(start: Callable[..., Any]) -> None:
    errors: list[str] = []

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        good = await sample_group(endpoint, "good")
        for bad in (
            Group("empty", good.task, ()),
            await sample_group(endpoint, "nan", score=lambda place: float("nan")),
            replace(good, id="none", trajectories=(replace(good.trajectories[0], rewards=()),)),
        ):
            with pytest.raises(PluginError) as caught:
                await sink.put(bad)
            errors.append(str(caught.value))
        await forever(endpoint, sink)

    await start(making)
    assert "has no trajectory" in errors[0]
    assert "group 'nan', trajectory 0" in errors[1]
    assert "has no reward" in errors[2]


async def test_an_environment_that_ends_too_soon_or_fails_ends_the_run(start: Callable[..., Any]) -> None:
    async def ends(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        await sink.put(await sample_group(endpoint, "only"))

    async def fails(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        raise RunError("the script died with exit code 3")

    with pytest.raises(RunError, match="'script' ended before the run's last step"):
        await start(ends)
    with pytest.raises(RunError, match="exit code 3"):
        await start(fails, run__name="other")


async def test_a_resumed_run_goes_on_from_its_manifest(
    start: Callable[..., Any], service: FakeService, tmp_path: Path
) -> None:
    def die(step: int) -> None:
        if step == 3:
            raise RuntimeError("killed")

    service.on_update = die
    with pytest.raises(RuntimeError):
        await start(forever, env__total_steps=6)
    service.on_update = lambda step: None
    finished = await start(lambda e, s: forever(e, s, prefix="r"), resume=True, env__total_steps=6)
    assert finished.steps == 6
    check_ledger(tmp_path / "runs/own/journal.jsonl", tmp_path / "runs/own")


async def test_old_policies_are_not_trained_on(start: Callable[..., Any], tmp_path: Path) -> None:
    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        old = [await sample_group(endpoint, f"old{n}") for n in range(3)]
        while sink.step < 2:
            await sink.put(await sample_group(endpoint, f"n{asyncio.get_running_loop().time()}"))
        for group in old:
            await sink.put(group)
        await forever(endpoint, sink)

    await start(making)
    folder = tmp_path / "runs/own"
    records = [record for path in folder.glob("rollouts/*.gz") for record in read_records(path)]
    assert {record["reason"] for record in records if record["group"].startswith("old")} <= {"stale", "stopped"}
    assert not [record for record in records if record["group"].startswith("old") and record["outcome"] == "trained"]
    check_ledger(folder / "journal.jsonl", folder)


async def test_an_environment_may_bring_a_state_of_its_own(
    start: Callable[..., Any], service: FakeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept(1000)
    monkeypatch.setattr(Script, "state", kept, raising=False)

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        if not await kept.pending():
            for number in range(12):
                await kept.put(await sample_group(endpoint, f"k{number}"))
        await asyncio.Event().wait()

    def die(step: int) -> None:
        if step == 3:
            raise RuntimeError("killed")

    service.on_update = die
    with pytest.raises(RuntimeError):
        await start(making, env__max_batches_offpolicy=9, env__total_steps=6)
    assert len(await kept.pending()) == 8, "two steps of two groups are in a manifest, all else is still there"
    service.on_update = lambda step: None
    await start(making, resume=True, env__max_batches_offpolicy=9, env__total_steps=6)
    assert not await kept.pending()
    folder = tmp_path / "runs/own"
    check_ledger(folder / "journal.jsonl", folder)
    records = [record for path in folder.glob("rollouts/step-*.gz") for record in read_records(path)]
    assert Counter(record["group"] for record in records) == {f"k{number}": 1 for number in range(12)}


def test_references_after_the_colon_become_settings(registry: Registry, tmp_path: Path) -> None:
    adapter = registry.load("adapter", "fake_sessions")
    registry.add(
        "env",
        EnvironmentSpec(
            "script",
            make=lambda config: None,
            kind="external",
            config=ScriptConfig,
            reference=lambda rests: {"scripts": tuple(rests)},
        ),
    )
    with pytest.raises(PluginError, match="puts no policy behind HTTP"):
        make_config(registry, tmp_path)
    registry.add("adapter", replace(adapter, endpoint=fake_endpoint))
    config = make_config(registry, tmp_path, run__env=("script:a.py=2", "script:b.py"))
    assert config.environment.scripts == ("a.py=2", "b.py")
    assert config.run.env == ("script:a.py=2", "script:b.py")
    again = load(None, [], registry=registry, base=config.as_dict())
    assert again.as_dict() == config.as_dict()
    with pytest.raises(PluginError, match="environment 'parity' takes nothing after a colon"):
        make_config(registry, tmp_path, run__env="parity:a.py")
    with pytest.raises(ConfigError, match="one run has one environment"):
        make_config(registry, tmp_path, run__env=("script:a.py", "parity:b.py"))
    with pytest.raises(ConfigError, match="the environment drives itself"):
        make_config(registry, tmp_path, rollout__temperature=0.5)
