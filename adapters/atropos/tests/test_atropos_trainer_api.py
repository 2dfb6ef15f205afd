"""A trainer in another process: it leases over HTTP and commits with its checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tinker_atropos.errors import RunError
from tinker_atropos.state import FencedOut
from tinker_atropos.trajectory import PolicyRef
from tinker_atropos_atropos.api_state import ApiState
from tinker_atropos_atropos.posted import decode_group
from tinker_atropos_atropos.stored import json_of

Make = Callable[..., dict[str, Any]]


@pytest.fixture
async def state(api: Any) -> AsyncIterator[ApiState]:
    async with ApiState(api.url) as state:
        yield state


def firsts(leased: list[Any]) -> list[int]:
    return [decode_group(json_of(entry.item)).tokens[0][0] for entry in leased]


async def test_leases_commit_and_what_is_not_committed_comes_again(api: Any, state: ApiState, make_group: Make) -> None:
    await api.register(4)
    fence = await state.fence()
    assert (await api.register_env())["status"] == "success"  # there is a trainer
    waiting = asyncio.create_task(state.lease(2, fence))
    for first in range(1, 6):
        await api.post("/scored_data", make_group(first))
    leased = await waiting
    assert firsts(leased) == [1, 2]
    assert leased[0].item.meta["sequences"] == 2
    assert firsts(await state.lease(1, fence)) == [3]
    await state.commit([leased[0].item.id], fence)
    await state.discard(leased[1].item.id, "too stale")
    await state.publish(PolicyRef("run", 0, 7, "x"))
    assert await api.get("/status") == {"current_step": 7, "queue_size": 2}
    newer = await state.fence()
    assert len(await state.rewind(newer)) == 1
    assert firsts(await state.lease(3, newer)) == [3, 4, 5]
    await api.post("/scored_data", make_group(1))  # trained: not taken again
    await api.post("/scored_data", make_group(2))  # discarded: nor this
    assert (await api.get("/status"))["queue_size"] == 0


async def test_an_older_trainer_is_refused(api: Any, state: ApiState, make_group: Make) -> None:
    await api.register(2)
    await api.post("/scored_data", make_group(1))
    old = await state.fence()
    waiting = asyncio.create_task(state.lease(5, old))
    await asyncio.sleep(0.1)
    new = await state.fence()
    with pytest.raises(FencedOut):
        await waiting
    for call in (state.lease(1, old), state.commit([], old), state.rewind(old)):
        with pytest.raises(FencedOut):
            await call
    asked = {"ids": ["0-x"], "reason": "stale"}
    for fence, status in ((old, 409), (new, 200), (None, 200)):
        assert (await api.call("POST", "/tinker-atropos/discard", asked | {"fence": fence}))[0] == status
    status, answer = await api.call("GET", "/batch")
    assert (status, answer["batch"]) == (409, [])
    await api.register(2)  # a trainer that fetches batches takes over
    with pytest.raises(FencedOut):
        await state.lease(1, new)
    with pytest.raises(FencedOut):
        await state.discard("0-x", "stale")
    assert await api.batch() == [1]


async def test_a_lost_answer_is_asked_for_again(api: Any, state: ApiState, make_group: Make) -> None:
    fence = await state.fence()
    for first in (1, 2):
        await api.post("/scored_data", make_group(first))
    asked = json.dumps({"n": 2, "fence": fence, "key": "k", "wait": 5})
    once, again = [await api.session.post(f"{api.url}/tinker-atropos/lease", data=asked) for _ in range(2)]
    assert once.status == 200
    assert await once.read() == await again.read()
    await api.post("/scored_data", make_group(3))
    assert firsts(await state.lease(1, fence)) == [3]


async def test_taking_over_from_a_trainer_that_fetches_returns_its_batch(
    api: Any, state: ApiState, make_group: Make
) -> None:
    await api.register(2)
    for first in (1, 2):
        await api.post("/scored_data", make_group(first))
    assert await api.batch() == [1]
    fence = await state.fence()
    assert firsts(await state.lease(2, fence)) == [1, 2]


async def test_what_can_never_be_had_is_refused(api: Any, state: ApiState) -> None:
    fence = await state.fence()
    with pytest.raises(RunError, match="can never be had"):
        await state.lease(1000, fence)
    for path in ("lease", "commit", "discard", "rewind", "publish"):
        assert (await api.call("POST", f"/tinker-atropos/{path}", {"fence": "x"}))[0] == 422


async def test_a_trainer_that_registers_first_may_commit_what_went_back_to_the_line(
    api: Any, state: ApiState, make_group: Make
) -> None:
    await api.register(2)
    for first in (1, 2, 3):
        await api.post("/scored_data", make_group(first))
    leased = await state.lease(2, await state.fence())
    await api.register(2)  # its next life: everything that was leased waits again …
    fence = await state.fence()
    await state.commit([leased[0].item.id], fence)  # … but for what its manifest lists
    await state.rewind(fence)
    assert firsts(await state.lease(2, fence)) == [2, 3]
    details = await api.get("/tinker-atropos/status")
    assert (details["held"], details["waiting_sequences"], details["environments"]) == (2, 0, 0)
