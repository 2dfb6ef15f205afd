"""The State in Redis: the contract on each server there is, and what it says when a server will not do."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from tinker_atropos.contract_tests.redis_server import RedisServer, find_servers
from tinker_atropos.contract_tests.state import make_group
from tinker_atropos.errors import ConfigError
from tinker_atropos.state import FencedOut, MemoryState, StateError, StoredItem, open_state
from tinker_atropos.state import redis_link as link
from tinker_atropos.state.protocol import remembered
from tinker_atropos.state.redis import RedisState
from tinker_atropos.state.redis_keys import NAMES, RunKeys
from tinker_atropos.testing import check_state
from tinker_atropos.trajectory import PolicyRef

NUMBERS = itertools.count()


@pytest.fixture
async def make(redis_server: RedisServer) -> AsyncIterator[Any]:
    """Return what makes States: of a new run, or of the one named."""
    states: list[RedisState[Any]] = []

    def made(cap: int = 4, run: str | None = None, **options: Any) -> RedisState[Any]:
        states.append(RedisState(redis_server.url, run or f"run {next(NUMBERS)}", cap, **options))
        return states[-1]

    yield made
    for state in states:
        await state.close()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[Redis]:
    async with Redis.from_url(redis_server.url) as client:
        yield client


@pytest.mark.parametrize("name", sorted(find_servers()))
async def test_each_server_passes_the_contract(name: str, tmp_path: Path) -> None:
    with RedisServer(tmp_path, find_servers()[name]) as server:

        async def make(cap: int) -> RedisState[Any]:
            return RedisState(server.url, uuid.uuid4().hex, cap)

        await check_state(make)


async def test_a_unix_socket_will_do(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("unix")
    with RedisServer(folder, None, "--unixsocket", str(folder / "socket")):

        async def make(cap: int) -> Any:
            return await open_state(f"unix://{folder}/socket?db=3", uuid.uuid4().hex, cap)

        await check_state(make)


async def test_two_processes_share_a_run(redis_server: RedisServer, make: Any) -> None:
    code = (
        "import asyncio\n"
        "from tinker_atropos.contract_tests.state import make_group\n"
        "from tinker_atropos.state import open_state\n"
        "async def main():\n"
        f"    state = await open_state({redis_server.url!r}, 'shared', 4)\n"
        "    print(await state.put(make_group('theirs')), await state.put(make_group('theirs')))\n"
        "    await state.close()\n"
        "asyncio.run(main())\n"
    )
    state = make(run="shared")
    waiting = asyncio.create_task(state.lease(1, await state.fence()))
    await asyncio.sleep(0.05)
    ended = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.split() == ["accepted", "duplicate"], ended.stderr
    assert [leased.item.id for leased in await waiting] == ["theirs"]


async def test_two_trainers_fence_each_other(make: Any) -> None:
    old, new = make(run="fenced"), make(run="fenced")
    first = await old.fence()
    for id in "abc":
        await old.put(make_group(id))
    await old.lease(2, first)
    waiting = asyncio.create_task(old.lease(2, first))
    await asyncio.sleep(0.05)
    second = await new.fence()
    with pytest.raises(FencedOut, match=f"epoch {first} is over: epoch {second} has taken"):
        await waiting
    await new.commit(["a"], second)  # as its manifest says
    with pytest.raises(FencedOut):
        await old.commit(["a", "b"], first)
    with pytest.raises(FencedOut):
        await old.discard("b", "stale", fence=first)
    assert [item.id for item in await new.rewind(second)] == ["b"]
    assert [leased.item.id for leased in await new.lease(2, second)] == ["b", "c"]


async def test_large_items_come_one_by_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_atropos.state.redis.REPLY_BYTES", 1_000)
    state = make()
    items = [StoredItem(str(size), "test", bytes(size), {}) for size in (10, 5_000, 300, 9_000)]
    for item in items:
        await state.put(item)
    fence = await state.fence()
    assert [leased.item for leased in await state.lease(4, fence)] == items
    assert await state.rewind(fence) == items


async def test_ended_ids_are_remembered_within_bounds(
    make: Any, client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos.state.redis.remembered", lambda cap: 5)
    state = make()
    fence = await state.fence()
    for number in range(12):
        await state.put(make_group(str(number)))
        await state.lease(1, fence)
        if number % 2:
            await state.commit([str(number)], fence)
        else:
            await state.discard(str(number), "stale")
    assert await state.put(make_group("11")) == "duplicate"
    assert await state.put(make_group("7")) == "duplicate"
    assert await state.put(make_group("6")) == "accepted"
    assert await client.hlen(state.keys.known) == 6
    assert await client.zcard(state.keys.ended) == 5
    assert await client.hkeys(state.keys.items) == [b"6"]
    for empty in (state.keys.leased, state.keys.held, state.keys.leases):
        assert not await client.exists(empty)
    assert remembered(4) == 10_000
    assert remembered(5_000) == 50_000


async def test_every_key_is_one_of_the_run_and_forget_removes_them(make: Any, client: Redis) -> None:
    state = make(run="of {braces} and ü")
    fence = await state.fence()
    for id in "abc":
        await state.put(make_group(id))
    await state.lease(2, fence)
    await state.rewind(fence)
    await state.lease(2, fence)
    await state.commit(["a"], fence)
    await state.publish(PolicyRef("r", 0, 0, "x"))
    mine = {key.decode() async for key in client.scan_iter("tinker-atropos:*braces*")}
    assert mine == set(state.keys.all)
    assert {tag(key) for key in mine} == {"of %7Bbraces%7D and %C3%BC"}
    await state.forget()
    assert not [key async for key in client.scan_iter("tinker-atropos:*braces*")]
    assert await state.put(make_group("a")) == "accepted"


def tag(key: str) -> str:
    """Return what a cluster hashes of a key."""
    return key.partition("{")[2].partition("}")[0]


def test_keys_are_named() -> None:
    keys = RunKeys("r")
    assert [getattr(keys, name) for name in NAMES] == keys.all
    for name in ("", "x" * 201):
        with pytest.raises(ValueError, match="use 1 to 200 characters"):
            RunKeys(name)


@pytest.mark.parametrize("id", ["", "ü \ud800", "a b\n", "x" * 10_000, "\0"])
async def test_any_string_may_be_an_id(make: Any, id: str) -> None:
    state = make()
    assert await state.put(StoredItem(id, "test", b"body")) == "accepted"
    fence = await state.fence()
    assert [leased.item.id for leased in await state.lease(1, fence)] == [id]
    await state.commit([id], fence)
    assert await state.put(StoredItem(id, "test", b"body")) == "duplicate"


async def test_an_unreadable_item_is_named_and_can_be_discarded(make: Any, client: Redis) -> None:
    state = make()
    await state.put(make_group("a"))
    await state.put(make_group("b"))
    await client.hset(state.keys.items, "a", b"rubbish")
    fence = await state.fence()
    with pytest.raises(StateError, match=r"item 'a' can't be read: 7 bytes that are no item.*`discard` it"):
        await state.lease(1, fence)
    await state.discard("a", "unreadable")
    assert [leased.item.id for leased in await state.lease(1, fence)] == ["b"]


async def test_an_item_that_redis_lost_is_an_error(make: Any, client: Redis) -> None:
    state = make()
    await state.put(make_group("a"))
    await client.hdel(state.keys.items, "a")
    with pytest.raises(StateError, match=r"lost the state of run .*item 'a' is gone.*appendonly yes"):
        await state.lease(1, await state.fence())


async def test_a_redis_that_was_emptied_is_an_error(make: Any, client: Redis) -> None:
    state = make()
    fence = await state.fence()
    await client.delete(*state.keys.all)
    with pytest.raises(StateError, match=r"lost the state of run .*epoch 0.*newest manifest"):
        await state.commit(["a"], fence)


async def test_another_format_is_refused(make: Any, client: Redis) -> None:
    state = make()
    await client.hset(state.keys.meta, "format", "2")
    with pytest.raises(StateError, match="kept in format b'2', this tinker-atropos reads 1"):
        await state.put(make_group("a"))


async def test_other_data_under_its_keys_is_an_error(make: Any, client: Redis) -> None:
    state = make()
    await client.set(state.keys.waiting, "text")
    with pytest.raises(StateError, match="holds other data under the keys of this run; use another run name"):
        await state.put(make_group("a"))


async def test_closing_ends_what_waits(make: Any) -> None:
    state = make(1)
    await state.put(make_group("a"))
    waiting = [
        asyncio.create_task(work) for work in (state.put(make_group("b")), state.lease(1, 99), anext(state.watch()))
    ]
    await asyncio.wait(waiting, timeout=0.1)
    await state.close()
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(error, StateError), error
    with pytest.raises(StateError, match="closed"):
        await state.size()


async def test_a_cancelled_lease_never_keeps_items(make: Any) -> None:
    state = make(8)
    fence = await state.fence()
    for number in range(8):
        await state.put(make_group(str(number)))
    for attempt in range(60):
        leasing = asyncio.create_task(state.lease(1 + attempt % 8, fence))
        await asyncio.sleep(attempt * 0.00005)
        leasing.cancel()
        await asyncio.wait([leasing])
        if not leasing.cancelled():
            await state.rewind(fence)
    all_of_them = await asyncio.wait_for(state.lease(8, fence), 5)
    assert [leased.item.id for leased in all_of_them] == [str(number) for number in range(8)]


async def test_calls_cancelled_at_any_moment_leave_the_connections_sound(make: Any) -> None:
    state = make(1_000)
    for attempt in range(100):
        putting = asyncio.create_task(state.put(StoredItem(str(attempt), "test", bytes(100_000)), wait=5))
        await asyncio.sleep(attempt % 20 * 0.0001)
        putting.cancel()
        await asyncio.wait([putting])
        assert await state.put(StoredItem(str(attempt), "test", b"")) in ("accepted", "duplicate")
    leased = await state.lease(100, await state.fence())
    assert [one.item.id for one in leased] == [str(attempt) for attempt in range(100)]


async def test_a_put_waits_as_long_as_it_was_told(make: Any) -> None:
    state = make(1)
    await state.put(make_group("a"))
    assert await state.put(make_group("b"), wait=0) == "blocked"
    queue = [asyncio.create_task(state.put(make_group(id), wait=0.1)) for id in "cde"]
    assert await asyncio.gather(*queue) == ["blocked"] * 3
    assert await state.put(make_group("a"), wait=0) == "duplicate"


async def test_a_change_wakes_what_waits_without_a_look(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOOK_SECONDS", "BLIND_LOOK_SECONDS"):
        monkeypatch.setattr(f"tinker_atropos.state.redis_news.{name}", 1_000.0)
    state, other = make(2, "woken"), make(2, "woken")
    fence = await state.fence()
    following = state.watch()
    async with asyncio.timeout(10):
        for step in range(3):
            newer = asyncio.ensure_future(anext(following))
            leasing = asyncio.create_task(state.lease(2, fence))
            await asyncio.sleep(0.05)
            await other.publish(PolicyRef("r", 0, step, "x"))
            await other.put(make_group(f"a{step}"))
            await other.put(make_group(f"b{step}"))
            assert (await newer).step == step
            assert [one.item.id for one in await leasing] == [f"a{step}", f"b{step}"]
            putting = asyncio.create_task(other.put(make_group(f"c{step}")))
            await asyncio.sleep(0.05)
            await state.discard(f"a{step}", "stale")
            assert await putting == "accepted"
            putting = asyncio.create_task(other.put(make_group(f"d{step}")))
            await asyncio.sleep(0.05)
            await state.commit([f"b{step}"], fence)
            assert await putting == "accepted"
            await state.commit([f"c{step}", f"d{step}"], fence)
        waiting = asyncio.create_task(state.lease(1, fence))
        await asyncio.sleep(0.05)
        await other.fence()
        with pytest.raises(FencedOut):
            await waiting


async def test_waiting_without_a_change_asks_seldom(make: Any, client: Redis) -> None:
    state = make(1)
    await state.put(make_group("a"))
    waiting = [asyncio.create_task(state.put(make_group(str(n)))) for n in range(10)]
    waiting.append(asyncio.create_task(state.lease(1, 0)))
    watching = asyncio.create_task(anext(state.watch()))
    await asyncio.sleep(0.3)
    before = (await client.info("stats"))["total_commands_processed"]
    await asyncio.sleep(1.0)
    assert (await client.info("stats"))["total_commands_processed"] - before < 40
    for task in [*waiting, watching]:
        task.cancel()
    await asyncio.wait([*waiting, watching])


# What a server refuses ---------------------------------------------------------------------------------------------

SECRET = "pa%2Fs%40s-w0rd"
PLAIN = "pa/s@s-w0rd"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server with a password and little memory."""
    with RedisServer(tmp_path_factory.mktemp("strict"), None, "--requirepass", PLAIN) as server:
        yield server


def address(server: RedisServer, user: str = "", password: str = SECRET) -> str:
    return f"redis://{user}:{password}@127.0.0.1:{server.port}/0"


async def test_a_password_is_used_and_never_shown(strict: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    state = await open_state(address(strict), "r", 2)
    assert await state.put(make_group("a")) == "accepted"
    await state.close()
    shown = [repr(state), caplog.text]
    for url in (address(strict, password="wrong"), f"redis://127.0.0.1:{strict.port}"):
        with pytest.raises(StateError, match=r"refuses the user or password .*; correct the URL") as caught:
            await open_state(url, "r", 2)
        shown.append(str(caught.value))
    for wrong in (f"redis://:{PLAIN}@127.0.0.1:1/0", f"redis://:{SECRET}@127.0.0.1:port/0"):
        with pytest.raises((ConfigError, StateError)) as failed:
            await open_state(wrong, "r", 2)
        shown.append("".join(map(repr, chain(failed.value))))
    assert not [text for text in shown if "w0rd" in text or "wrong" in text]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


async def test_an_unreachable_server_is_named_in_time() -> None:
    assert link.OPEN_SECONDS < 15
    with pytest.raises(StateError, match=r"redis://127.0.0.1:1/0 does not answer: .*; start it, or correct") as caught:
        await open_state(f"redis://user:{SECRET}@127.0.0.1:1/0?socket_timeout=9", "r", 2)
    assert "w0rd" not in str(caught.value)
    assert "user" not in str(caught.value).partition("redis://")[2].partition(" ")[0]


async def test_a_server_of_something_else_is_an_error() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(StateError, match=f"127.0.0.1:{port}"):
            await open_state(f"redis://127.0.0.1:{port}", "r", 2)


async def test_a_full_redis_refuses_items_and_lets_the_trainer_free_room(strict: RedisServer) -> None:
    async with Redis.from_url(address(strict)) as client:
        used = (await client.info("memory"))["used_memory"]
        state = RedisState[StoredItem](address(strict), "full", 1_000)
        try:
            fence = await state.fence()
            noise = secrets.token_bytes(100_000)

            async def put_all() -> None:
                for number in range(100):
                    await state.put(StoredItem(str(number), "test", noise))

            await client.config_set("maxmemory", used + 3_000_000)
            with pytest.raises(StateError, match=r"127.0.0.1:\d+/0 is out of memory; raise its maxmemory"):
                await put_all()
            kept = [item.id for item in await state.pending()]
            assert 5 < len(kept) < 50
            leased = [one.item.id for one in await state.lease(len(kept), fence)]
            assert leased == kept
            await state.rewind(fence)
            await state.publish(PolicyRef("full", 0, 1, "x"))
            await state.lease(len(kept), fence)
            await state.commit(kept, await state.fence())
            assert await state.put(StoredItem("later", "test", b"x")) == "accepted"
        finally:
            await client.config_set("maxmemory", 0)
            await state.close()


async def test_a_redis_that_evicts_is_refused(strict: RedisServer) -> None:
    async with Redis.from_url(address(strict)) as client:
        await client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            with pytest.raises(StateError, match=r"allkeys-lru.*set `maxmemory-policy noeviction`"):
                await open_state(address(strict), "r", 2)
        finally:
            await client.config_set("maxmemory-policy", "noeviction")


async def test_a_redis_that_forgets_is_said(strict: RedisServer) -> None:
    said: list[str] = []
    async with Redis.from_url(address(strict)) as client:
        await client.config_set("appendonly", "no")
        try:
            await (await open_state(address(strict), "r", 2, say=said.append)).close()
        finally:
            await client.config_set("appendonly", "yes")
    assert len(said) == 1
    assert "set `appendonly yes`" in said[0]


async def test_a_user_may_be_limited_to_our_keys(strict: RedisServer) -> None:
    async with Redis.from_url(address(strict)) as client:
        rights = ["~tinker-atropos:*", "resetchannels", "&tinker-atropos:*", "+@all", "-@dangerous", "+info"]
        await client.execute_command("ACL", "SETUSER", "trainer", "on", f">{PLAIN}", *rights)
        await client.execute_command(
            "ACL", "SETUSER", "reader", "on", f">{PLAIN}", "~*", "&*", "+@read", "+@connection"
        )

        async def make(cap: int) -> Any:
            return await open_state(address(strict, "trainer"), uuid.uuid4().hex, cap)

        await check_state(make)
        with pytest.raises(StateError, match=r"refuses its user a command.*give it `~tinker-atropos"):
            await open_state(address(strict, "reader"), "r", 2)


@pytest.mark.parametrize("url", ["memori", "redis:/x", "http://localhost", "", "redis//:pa@host"])
async def test_an_unknown_address_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match="use memory, or redis://host:port/0"):
        await open_state(url, "r", 2)


async def test_memory_is_a_state_too() -> None:
    assert isinstance(await open_state("memory", "r", 2), MemoryState)


async def test_without_its_client_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "redis" or name.startswith("tinker_atropos.state.redis")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'tinker-atropos\[redis\]'"):
        await open_state("redis://localhost", "r", 2)


@pytest.mark.parametrize("cap", [0, -1])
async def test_a_cap_below_one_makes_no_sense(cap: int) -> None:
    with pytest.raises(ValueError, match="at least one item"):
        await open_state("redis://localhost", "r", cap)


async def test_a_cancellation_is_never_forgotten(redis_server: Any) -> None:
    state: Any = await open_state(redis_server.url, "cancelled", 1_000_000)
    rng = random.Random(0)

    async def put_for_ever(trial: int) -> None:
        number = 0
        while True:
            number += 1
            await state.put(make_group(f"{trial}-{number}"))

    for trial in range(40):
        task = asyncio.create_task(put_for_ever(trial))
        await asyncio.sleep(rng.random() * 0.01)
        task.cancel()
        ended, _ = await asyncio.wait({task}, timeout=20)
        task.cancel()
        assert ended, "the task goes on although it was cancelled"
    await state.forget()
    await state.close()
