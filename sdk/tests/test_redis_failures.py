"""The State in Redis while things die: the server, a connection, a reply on its way, a producer, a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from tinker_atropos.contract_tests.redis_server import RedisServer, find_servers
from tinker_atropos.contract_tests.state import make_group
from tinker_atropos.state import FencedOut, StoredItem
from tinker_atropos.state import redis_link as link
from tinker_atropos.state.redis import RedisState
from tinker_atropos.trajectory import PolicyRef

PRODUCERS, EACH, BATCH = 8, 200, 10


@pytest.fixture(params=sorted(find_servers()))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, to be killed."""
    with RedisServer(tmp_path, find_servers()[request.param]) as server:
        yield server


class Lossy:
    """Stands between client and server: passes everything on, but loses the reply to a script when told to."""

    def __init__(self, port: int) -> None:
        self.target, self.lose, self.lost = port, 0, 0

    async def __aenter__(self) -> Lossy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream = await asyncio.open_connection("127.0.0.1", self.target)
        asked = b""

        async def requests() -> None:
            nonlocal asked
            while data := await reader.read(1 << 20):
                asked = data
                upstream.write(data)

        sending = asyncio.create_task(requests())
        with contextlib.suppress(OSError):
            while data := await upstream_reader.read(1 << 20):
                if self.lose and b"EVAL" in asked:
                    self.lose -= 1
                    self.lost += 1
                    break
                writer.write(data)
        sending.cancel()
        upstream.close()
        writer.close()


@pytest.fixture
async def lossy(redis_server: RedisServer) -> AsyncIterator[Lossy]:
    async with Lossy(redis_server.port) as proxy:
        yield proxy


async def test_a_lost_reply_does_nothing_twice(lossy: Lossy, request: pytest.FixtureRequest) -> None:
    state = RedisState[Any](lossy.url, request.node.name, 4)

    async def losing(call: Any) -> Any:
        lossy.lose, before = 2, lossy.lost
        answer = await asyncio.wait_for(call, 10)
        assert lossy.lost == before + 2
        return answer

    first = await losing(state.fence())
    assert first == 1
    for id in "abcd":
        assert await losing(state.put(make_group(id))) == "accepted"
    assert [one.item.id for one in await losing(state.lease(2, first))] == ["a", "b"]
    assert await state.size() == 2
    await losing(state.commit(["a"], first))
    assert [item.id for item in await losing(state.rewind(first))] == ["b"]
    assert [item.id for item in await losing(state.rewind(first))] == []
    await losing(state.discard("c", "stale"))
    assert [one.item.id for one in await losing(state.lease(2, first))] == ["b", "d"]
    await losing(state.publish(PolicyRef("r", 0, 0, "x")))
    assert await anext(state.watch()) == PolicyRef("r", 0, 0, "x")
    await state.close()


async def test_a_lost_acknowledgement_of_an_item_already_trained_on_is_accepted(
    lossy: Lossy, redis_server: RedisServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "FIRST_PAUSE", 0.5)
    producer = RedisState[Any](lossy.url, request.node.name, 4)
    trainer = RedisState[Any](redis_server.url, request.node.name, 4)
    await producer.size()
    lossy.lose = 1
    putting = asyncio.create_task(producer.put(make_group("a")))
    fence = await trainer.fence()
    await trainer.lease(1, fence)
    await trainer.commit(["a"], fence)
    assert not putting.done()
    assert await putting == "accepted"
    assert await producer.put(make_group("a")) == "duplicate"
    assert await trainer.size() == 0
    await producer.close()
    await trainer.close()


async def test_dropped_connections_are_opened_again(redis_server: RedisServer, request: pytest.FixtureRequest) -> None:
    state = RedisState[Any](redis_server.url, request.node.name, 4)
    fence = await state.fence()
    waiting = asyncio.create_task(state.lease(2, fence))
    following = asyncio.ensure_future(anext(state.watch()))
    async with Redis.from_url(redis_server.url) as client:
        for id in "ab":
            await asyncio.sleep(0.1)
            for kind in ("normal", "pubsub"):
                await client.execute_command("CLIENT", "KILL", "TYPE", kind)
            await state.put(make_group(id))
    assert [one.item.id for one in await waiting] == ["a", "b"]
    await state.publish(PolicyRef("r", 0, 0, "x"))
    assert (await asyncio.wait_for(following, 10)).uri == "x"
    await state.close()


async def test_a_killed_server_is_waited_for_and_has_lost_nothing(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "SAY_AFTER", 0.2)
    said: list[str] = []
    state = RedisState[Any](server.url.replace("redis://", "redis://:@"), "killed", 4, say=said.append)
    fence = await state.fence()
    for id in "abc":
        await state.put(make_group(id))
    assert [one.item.id for one in await state.lease(1, fence)] == ["a"]
    waiting = asyncio.create_task(state.lease(3, fence))
    following = state.watch()
    await state.publish(PolicyRef("r", 0, 0, "x"))
    assert (await anext(following)).step == 0
    newer = asyncio.ensure_future(anext(following))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(server.kill)
    assert await state.put(make_group("e"), wait=0.1) == "blocked"
    putting = asyncio.create_task(state.put(make_group("d")))
    committing = asyncio.create_task(state.commit(["a"], fence))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    assert not putting.done()
    await asyncio.to_thread(server.start)
    assert await putting == "accepted"
    await committing
    assert [one.item.id for one in await asyncio.wait_for(waiting, 10)] == ["b", "c", "d"]
    assert [item.id for item in await state.rewind(fence)] == ["b", "c", "d"]
    await state.publish(PolicyRef("r", 0, 1, "x"))
    assert (await asyncio.wait_for(newer, 10)).step == 1
    assert len(said) == 2, said
    assert "does not answer" in said[0]
    assert "answers again" in said[1]
    assert f"redis://127.0.0.1:{server.port}/0" in said[0]
    await state.close()


async def test_a_server_that_hangs_does_not_hold_a_put_beyond_its_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinker_atropos.state.redis.GRACE_SECONDS", 0.2)
    state = RedisState[Any](server.url, "hung", 4)
    fence = await state.fence()
    server.pause()
    try:
        assert await asyncio.wait_for(state.put(make_group("a"), wait=0.1), 10) == "blocked"
        leasing = asyncio.create_task(state.lease(1, fence))
        await asyncio.sleep(0.1)
        leasing.cancel()
        await asyncio.wait([leasing])
    finally:
        server.resume()
    assert await state.put(make_group("a")) in ("accepted", "duplicate")  # the hung one may have been read after all
    assert [one.item.id for one in await asyncio.wait_for(state.lease(1, fence), 10)] == ["a"]
    await state.close()


PRODUCER = """
import asyncio, sys
from pathlib import Path
from tinker_atropos.state import StoredItem, open_state

async def main(url, run, cap, name, count, journal):
    state = await open_state(url, run, int(cap), say=lambda text: None)
    done = set(Path(journal).read_text().split()) if Path(journal).exists() else set()
    with open(journal, "a") as file:
        for number in range(int(count)):
            id = f"{name}-{number}"
            if id not in done:
                answer = await state.put(StoredItem(id, "test", id.encode() * 100), wait=5)
                while answer == "blocked":
                    answer = await state.put(StoredItem(id, "test", id.encode() * 100), wait=5)
                file.write(id + "\\n")
                file.flush()
    await state.close()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("server", sorted(find_servers())[:1], indirect=True)  # it takes half a minute
async def test_nothing_is_lost_or_trained_twice_whatever_is_killed(server: RedisServer, tmp_path: Path) -> None:
    """Producers, the server and the trainer are killed at random moments; what the manifest lists decides."""
    rng = random.Random(0)
    arguments = [server.url, "soak", "40"]

    async def start(name: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", PRODUCER, *arguments, str(name), str(EACH), str(tmp_path / f"journal-{name}")
        )

    producers = [await start(name) for name in range(PRODUCERS)]
    manifest: list[str] = []
    kills = Counter[str]()

    async def train() -> None:
        """Train until all is trained on; die now and then between training, manifest and commit."""
        while len(manifest) < PRODUCERS * EACH:
            state = RedisState[StoredItem](server.url, "soak", 40, say=lambda text: None)
            try:
                fence = await state.fence()
                await state.commit(manifest[-10 * BATCH :], fence)
                await state.rewind(fence)
                while len(manifest) < PRODUCERS * EACH:
                    leased = await state.lease(BATCH, fence)
                    assert all(one.item.body == one.item.id.encode() * 100 for one in leased)
                    if rng.random() < 0.03:
                        kills["trainer before its manifest"] += 1
                        break
                    manifest.extend(one.item.id for one in leased)
                    if rng.random() < 0.03:
                        kills["trainer before its commit"] += 1
                        break
                    await state.commit([one.item.id for one in leased], fence)
            finally:
                await state._link.close()  # as a dead process: nothing is given back

    async def kill() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.2, 0.8))
            if rng.random() < 0.6:
                await asyncio.to_thread(server.kill)
                await asyncio.sleep(rng.uniform(0, 0.3))
                await asyncio.to_thread(server.start)
                kills["server"] += 1
            else:
                name = rng.randrange(PRODUCERS)
                if producers[name].returncode is None:
                    producers[name].kill()
                    await producers[name].wait()
                    producers[name] = await start(name)
                    kills["producer"] += 1

    killing = asyncio.create_task(kill())
    training = asyncio.create_task(train())
    try:
        async with asyncio.timeout(120):
            await asyncio.wait([killing, training], return_when=asyncio.FIRST_COMPLETED)
            await training
    finally:
        killing.cancel()
        await asyncio.wait([killing])
        if server.process is None:
            server.start()
        for process in producers:
            if training.cancelled() or process.returncode is None:
                with contextlib.suppress(asyncio.TimeoutError, ProcessLookupError):
                    await asyncio.wait_for(process.wait(), 20)
                    continue
                process.kill()
    expected = {f"{name}-{number}" for name in range(PRODUCERS) for number in range(EACH)}
    assert {id: count for id, count in Counter(manifest).items() if count > 1} == {}
    assert set(manifest) == expected
    assert kills["server"] >= 1, kills
    state = RedisState[StoredItem](server.url, "soak", 40)
    assert await state.pending() == []
    await state.close()


async def test_attempts_that_a_hung_server_reads_late_take_no_more(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REPLY_SECONDS", 0.2)
    state = RedisState[Any](server.url, "late", 8)
    fence = await state.fence()
    for id in "abcd":
        await state.put(make_group(id))
    server.pause()
    leasing, putting = asyncio.create_task(state.lease(1, fence)), asyncio.create_task(state.put(make_group("e")))
    await asyncio.sleep(1)
    server.resume()
    assert [one.item.id for one in await asyncio.wait_for(leasing, 10)] == ["a"]
    assert await asyncio.wait_for(putting, 10) == "accepted"
    await asyncio.sleep(0.2)
    assert await state.size() == 4
    fence = await state.fence()
    assert [item.id for item in await state.rewind(fence)] == ["a"]
    await state.close()


async def test_an_old_trainer_that_waits_through_a_restart_is_fenced_out(server: RedisServer) -> None:
    old, new = (RedisState[Any](server.url, "two", 4) for _ in range(2))
    waiting = asyncio.create_task(old.lease(1, await old.fence()))
    await asyncio.sleep(0.1)
    await asyncio.to_thread(server.kill)
    fencing = asyncio.create_task(new.fence())
    await asyncio.to_thread(server.start)
    fence = await fencing
    with pytest.raises(FencedOut):
        await asyncio.wait_for(waiting, 10)
    await new.put(make_group("a"))
    assert [one.item.id for one in await new.lease(1, fence)] == ["a"]
    await old.close()
    await new.close()


async def test_a_closing_state_gives_back_what_a_cancelled_lease_took(
    redis_server: RedisServer, request: pytest.FixtureRequest
) -> None:
    state, other = (RedisState[Any](redis_server.url, request.node.name, 4) for _ in range(2))
    fence = await state.fence()
    await state.put(make_group("a"))
    leasing = asyncio.create_task(state.lease(1, fence))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    leasing.cancel()
    await asyncio.wait([leasing])
    await state.close()
    assert [one.item.id for one in await asyncio.wait_for(other.lease(1, fence), 5)] == ["a"]
    await other.close()
