"""Runs whose groups wait in a real Redis: what was accepted ends exactly once, whoever dies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos.errors import ConfigError
from tinker_atropos.external import GroupSink
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run import run
from tinker_atropos.run_folder import RunFolder
from tinker_atropos.state import open_state
from tinker_atropos.testing import check_ledger

from .conftest import FakeService
from .run_records import Killed, metrics_of
from .test_external_run import FakeEndpoint, sample_group, start

__all__ = ["start"]


def ended(folder: Path) -> Counter[str]:
    return Counter(
        record["group"] for path in sorted(folder.glob("rollouts/step-*.gz")) for record in read_records(path)
    )


async def test_groups_accepted_before_a_death_end_exactly_once(
    start: Callable[..., Any], service: FakeService, tmp_path: Path, redis_server: Any
) -> None:
    accepted: list[str] = []

    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        while len(accepted) < 60:
            id = f"g{len(accepted)}"
            answer = await sink.put(await sample_group(endpoint, id))
            assert answer in ("accepted", "duplicate")  # a death may come between the deed and its answer
            accepted.append(id)
        await sink.put(await sample_group(endpoint, "g0"))  # a late repetition, and then nothing
        while True:
            id = f"more{service.trainers}.{len(accepted)}"
            await sink.put(await sample_group(endpoint, id))
            accepted.append(id)

    deaths = {3, 7, 8}

    def die(step: int) -> None:
        if step in deaths:
            deaths.remove(step)
            raise Killed

    service.on_update = die
    settings = {"run__state": redis_server.url, "env__max_batches_offpolicy": 30, "env__total_steps": 24}
    resume = False
    while True:
        try:
            await start(making, resume=resume, **settings)
            break
        except Killed:
            resume = True
    assert not deaths
    folder = tmp_path / "runs/own"
    check_ledger(folder / "journal.jsonl", folder)
    state = await open_state(redis_server.url, "own", 10_000)
    waiting = {group.id for group in await state.pending()}
    await state.close()
    counts = ended(folder)
    assert max(counts.values()) == 1
    assert not waiting & set(counts)
    listed = {id for manifest in RunFolder(folder).manifests() for id in manifest.discarded}
    assert set(accepted) <= set(counts) | waiting | listed
    assert {f"g{n}" for n in range(40)} <= set(counts), "first in, first out, also over restarts"


async def test_a_text_run_makes_anew_what_a_dead_one_left(make_config, registry, notes, service, redis_server):
    config = make_config(run__state=redis_server.url, run__name="text", env__max_batches_offpolicy=2)

    def die(step: int) -> None:
        if step == 3:
            raise Killed

    service.on_update = die
    with pytest.raises(Killed):
        await run(config, notes, registry=registry)
    service.on_update = lambda step: None
    await run(config, notes, registry=registry, resume=True)
    assert [row["step"] for row in metrics_of(config)] == list(range(7))
    check_ledger(config.folder / "journal.jsonl", config.folder)


async def test_a_new_run_does_not_take_up_the_groups_of_another_of_its_name(
    start: Callable[..., Any], redis_server: Any
) -> None:
    async def making(endpoint: FakeEndpoint, sink: GroupSink) -> None:
        raise AssertionError("nothing is started")

    state = await open_state(redis_server.url, "taken", 10)
    await state.put(await a_group())
    with pytest.raises(ConfigError, match="holds 1 groups of a run called 'taken' already"):
        await start(making, run__state=redis_server.url, run__name="taken")
    await state.close()


async def a_group() -> Any:
    from tinker_atropos.contract_tests.state import make_group

    return make_group("left")


def test_a_password_in_the_address_is_refused_and_the_variable_named(make_config: Any) -> None:
    with pytest.raises(ConfigError, match="TINKER_ATROPOS_REDIS_PASSWORD") as caught:
        make_config(run__state="redis://:hunter2@127.0.0.1:6379/0")
    assert "hunter2" not in str(caught.value)
