"""A run whose groups wait in a trajectory API elsewhere: the real API over a socket, the State that a run has of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from tinker_atropos.errors import ConfigError, PluginError, RunError, TransientError
from tinker_atropos.external import Proven
from tinker_atropos.state import FencedOut, MemoryState, State, StateError
from tinker_atropos.trajectory import Group, PolicyRef
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_remote import RemoteEnvironment
from tinker_atropos_atropos.script_state import RemoteGroups, held_at_most
from tinker_atropos_atropos.serving import serving
from tinker_atropos_atropos.state_backend import StateBackend

REF = PolicyRef("run", 0, 0, "fake://0")


class Prover:
    """A fake endpoint that knows of tokens below 100 alone."""

    url, token, model, tokenizer, context_length = "http://127.0.0.1:9/v1", None, "tiny", "/models/tiny", 64

    def seen(self) -> dict[str, int]:
        return {}

    async def ready(self) -> None:
        pass

    def prove(self, tokens: Any, logprobs: Any = None) -> Proven:
        known = np.asarray(tokens) < 100
        return Proven(known, np.where(known, -0.5, 0).astype(np.float32), (REF,), ("stop",))


def posted(first: int) -> dict[str, Any]:
    rows = [[1, first, place] for place in range(4)]
    return {"tokens": rows, "masks": [[-100, *row[1:]] for row in rows], "scores": [0.0, 1.0, 0.0, 1.0]}


async def send(url: str, method: str, path: str, body: Any = None) -> Any:
    async with aiohttp.ClientSession() as session, session.request(method, url + path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json()


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with serving(StateBackend(MemoryState(64))) as address:
        yield address


@asynccontextmanager
async def opened(url: str, info: Any) -> AsyncIterator[tuple[RemoteGroups, int]]:
    state = RemoteGroups(AtroposConfig(api_url=url, wandb_project="p", wandb_group="g"), None)
    state.begin(info)
    try:
        fence = await state.fence()
        await state.join(Prover())
        yield state, fence
    finally:
        await state.close()


async def test_environments_are_told_the_runs_sizes_and_the_names_for_their_logs(url: str, info: Any) -> None:
    async with opened(url, info) as (state, _):
        assert await send(url, "GET", "/info") == {"batch_size": 8, "max_token_len": 257}
        assert await send(url, "GET", "/wandb_info") == {"group": "g", "project": "p"}
        asked = {"max_token_length": 256, "desired_name": "math", "weight": 1.0, "group_size": 4}
        assert (await send(url, "POST", "/register-env", asked))["status"] == "success"
        await state.publish(PolicyRef("run", 0, 5, "fake://5"))
        assert (await send(url, "GET", "/status"))["current_step"] == 5
        seen, waiting = await state.observe()
        assert (seen.registered, seen.posted, waiting) == (True, 0, 0)


async def test_environments_are_told_the_folder_for_their_own_checkpoints(url: str, info: Any, tmp_path: Any) -> None:
    for given, told in ((None, info.folder), (tmp_path / "theirs", tmp_path / "theirs")):
        state = RemoteGroups(AtroposConfig(api_url=url, checkpoint_dir=given), None)
        state.begin(info)
        await state.fence()
        await send(url, "POST", "/scored_data", posted(10))
        asked = {"max_token_length": 256, "desired_name": "math", "weight": 1.0, "group_size": 4}
        answer = await send(url, "POST", "/register-env", asked)
        assert answer.get("checkpoint_dir") == str(told), answer
        await state.close()


async def test_groups_come_proven_first_in_first_out_and_are_gone_once_committed(url: str, info: Any) -> None:
    async with opened(url, info) as (state, fence):
        for first in (10, 11, 12):
            await send(url, "POST", "/scored_data", posted(first))
        assert (await state.observe())[1] == 12
        groups = [leased.group for leased in await state.lease(2, fence)]
        assert [int(group.trajectories[0].segments[0].tokens[1]) for group in groups] == [10, 11]
        assert groups[0].scores == (0.0, 1.0, 0.0, 1.0)
        assert groups[0].trajectories[0].sampled_tokens == 2
        assert [group.id for group in await state.pending()] == [group.id for group in groups]
        await state.commit([group.id for group in groups], fence)
        assert await state.pending() == []
    async with opened(url, info) as (state, fence):
        (left,) = await state.lease(1, fence)
        assert int(left.group.trajectories[0].segments[0].tokens[1]) == 12


async def test_it_is_a_state_of_groups_whose_notes_and_puts_are_refused(url: str, info: Any, make_group: Any) -> None:
    async with opened(url, info) as (remote, fence):
        state: State[Group] = remote
        assert (state.durable, state.cap) == (True, 64)
        await send(url, "POST", "/scored_data", posted(10))
        await send(url, "POST", "/scored_data", posted(11))
        assert await state.size() == 2
        (leased,) = await state.lease(1, fence)
        assert await state.size() == 1
        with pytest.raises(FencedOut):
            await state.discard(leased.group.id, "stale", fence=fence - 1)
        assert [group.id for group in await state.pending()] == [leased.group.id]
        await state.discard(leased.group.id, "stale", fence=fence)
        assert await state.pending() == []
        with pytest.raises(StateError, match="come from"):
            await state.put(make_group([0.0, 1.0]))
        with pytest.raises(StateError, match="groups alone"):
            await state.set_note("cursor", b"")
        assert await state.note("cursor") is None


async def test_what_no_manifest_counts_comes_again(url: str, info: Any) -> None:
    async with opened(url, info) as (state, fence):
        await send(url, "POST", "/scored_data", posted(10))
        await send(url, "POST", "/scored_data", posted(11))
        first = [leased.group.id for leased in await state.lease(2, fence)]
    async with opened(url, info) as (state, fence):  # what died had written a manifest that counts the first
        await state.commit(first[:1], fence)
        await state.rewind(fence)
        (again,) = await state.lease(1, fence)
        assert again.group.id == first[1]
        assert (await state.observe())[0].posted == 2


async def test_a_group_of_which_nothing_is_proven_carries_the_reason(url: str, info: Any) -> None:
    async with opened(url, info) as (state, fence):
        group = {**posted(200), "tokens": [[1, 200, 300]] * 4, "masks": [[-100, 200, 300]] * 4}
        await send(url, "POST", "/scored_data", group)
        (leased,) = await state.lease(1, fence)
        assert leased.group.overrides["refused"] == "unproven"
        await state.discard(leased.group.id, "unproven")
        assert await state.pending() == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [[1] * 65] * 4, "masks": [[-100] + [1] * 64] * 4}, "longer than the context"),
        ({"images": ["a picture"] * 4}, "images"),
        ({"scores": [0.0, 1.0, 1e308 * 10, 0.0]}, None),
    ],
)
async def test_what_the_trainer_could_not_take_carries_the_reason_and_the_next_is_trained(
    url: str, info: Any, change: dict[str, Any], reason: str | None
) -> None:
    async with opened(url, info) as (state, fence):
        if reason is None:  # the API itself refuses it
            with pytest.raises(AssertionError):
                await send(url, "POST", "/scored_data", {**posted(10), **change})
        else:
            await send(url, "POST", "/scored_data", {**posted(10), **change})
            (leased,) = await state.lease(1, fence)
            assert leased.group.overrides["refused"] == reason
            await state.discard(leased.group.id, reason)
        await send(url, "POST", "/scored_data", posted(11))
        (leased,) = await state.lease(1, fence)
        assert "refused" not in leased.group.overrides


async def test_what_no_trainer_takes_is_no_end_of_the_run(url: str, info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(group: Any) -> None:
        raise PluginError("an advantage is not finite")

    monkeypatch.setattr("tinker_atropos_atropos.script_state.check_group", refuses)
    async with opened(url, info) as (state, fence):
        await send(url, "POST", "/scored_data", posted(10))
        (leased,) = await state.lease(1, fence)
        assert leased.group.overrides["refused"] == "no trainer can take it"


async def test_a_run_that_the_api_has_no_room_for_is_refused_before_it_waits_for_ever(info: Any) -> None:
    long = dataclasses.replace(info, total_steps=500, checkpoint_interval=100)  # 2 groups a step, and 2 batches ahead
    async with serving(StateBackend(MemoryState(64))) as url:
        with pytest.raises(ConfigError, match=r"holds 64 groups.* room for 204: .*--cap 408.* to at most 30"):
            async with opened(url, long):
                pass
        with pytest.raises(ConfigError, match=r"room for 1004.*at the end alone"):
            async with opened(url, dataclasses.replace(long, checkpoint_interval=0)):
                pass
        async with opened(url, dataclasses.replace(long, checkpoint_interval=30)) as (state, _):
            assert state.cap == 64


async def test_a_trainer_that_waits_for_groups_which_the_api_has_no_room_for_is_told(info: Any) -> None:
    short = dataclasses.replace(info, total_steps=1, max_staleness=0)
    async with serving(StateBackend(MemoryState(4))) as url, opened(url, short) as (state, fence):
        for first in range(10, 14):
            await send(url, "POST", "/scored_data", posted(first))
        leased = await state.lease(4, fence)
        for _ in range(4):
            await state.observe()  # the trainer is at work
        waiting = asyncio.create_task(state.lease(1, fence))
        for _ in range(2):
            await asyncio.sleep(0.01)
            await state.observe()
        with pytest.raises(RunError, match=r"is full: of the 4 groups .* --resume"):
            await state.observe()
        await state.discard(leased[0].group.id, "stale")
        await send(url, "POST", "/scored_data", posted(20))
        assert int((await waiting)[0].group.trajectories[0].segments[0].tokens[1]) == 20
        await state.observe()


@pytest.mark.parametrize(("total", "interval", "needed"), [(2, 10, 8), (2, 0, 8), (100, 1, 6), (100, 10, 24)])
def test_what_a_run_holds_in_the_api(info: Any, total: int, interval: int, needed: int) -> None:
    assert held_at_most(dataclasses.replace(info, total_steps=total, checkpoint_interval=interval)) == needed


async def test_a_newer_trainer_takes_over_and_the_older_is_told(url: str, info: Any) -> None:
    async with opened(url, info) as (old, fence):
        waiting = asyncio.create_task(old.lease(1, fence))
        await asyncio.sleep(0.05)
        async with opened(url, info):
            with pytest.raises(FencedOut, match="another trainer has registered"):
                await waiting


async def test_an_address_that_is_no_trajectory_api_is_said(info: Any, endpoint: Any) -> None:
    from aiohttp import web

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", _hello)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state = RemoteGroups(AtroposConfig(api_url=f"http://127.0.0.1:{runner.addresses[0][1]}"), None)
    state.begin(info)
    with pytest.raises(RunError, match="no trajectory API"):
        await state.fence()
    await state.close()
    await runner.cleanup()


async def _hello(request: Any) -> Any:
    from aiohttp import web

    return web.Response(text="hello")


async def test_an_api_that_is_not_there_is_waited_for_then_given_up(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_state.GONE_SECONDS", 0.5)
    state = RemoteGroups(AtroposConfig(api_url="http://127.0.0.1:9"), None)
    state.begin(info)
    with pytest.raises(TransientError):
        await state.observe()
    with pytest.raises(RunError, match="tinker-atropos run-api"):
        await state.fence()
    await state.close()


async def test_an_api_that_accepts_and_does_not_answer_is_given_up(info: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr("tinker_atropos_atropos.script_state.GONE_SECONDS", 0.3)
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        state = RemoteGroups(AtroposConfig(api_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), None)
        state.begin(info)
        async with asyncio.timeout(60):
            with pytest.raises(RunError, match="has not answered"):
                await state.fence()
            with pytest.raises(RunError, match="has not answered"):
                await state.discard("g", "stale")
        await state.close()


async def test_an_api_that_goes_during_a_long_wait_is_gone_since_its_last_answer(
    info: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_state.GONE_SECONDS", 0.3)
    state = RemoteGroups(AtroposConfig(api_url="http://127.0.0.1:9"), None)
    calls = 0

    async def lease() -> int:
        nonlocal calls
        calls += 1
        if calls == 1:
            await asyncio.sleep(0.5)
            state._api.answered = asyncio.get_running_loop().time()
            raise TransientError("it restarts")
        return 7

    assert await state._patiently(lease) == 7


async def test_the_environment_says_where_groups_come_from_and_who_is_silent(
    url: str, info: Any, sink: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos_atropos.script_watch.QUIET_SECONDS", 0.5)
    environment = RemoteEnvironment(AtroposConfig(api_url=url))
    assert environment.endpoint == {"port": 8001}
    state: Any = environment.state
    state.begin(info)
    await state.fence()
    task = asyncio.create_task(environment.run(Prover(), sink))
    await until(lambda: any("has not registered" in line for line in sink.lines), task)
    assert any(url in line for line in sink.lines)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await environment.close()
