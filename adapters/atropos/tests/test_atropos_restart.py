"""What outlives the API's process, and what does not: in Redis everything, in memory nothing.

`Survivor` is memory that stands for a server of its own: the API over it ends, and another begins. The same runs on a
real Redis, and there with processes that are killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from tinker_atropos.state import MemoryState, State, StoredItem, open_state
from tinker_atropos_atropos.posted import decode_group
from tinker_atropos_atropos.stored import json_of

Make = Callable[..., dict[str, Any]]


class Survivor(MemoryState[StoredItem]):
    """A State that stays when the API closes it; `fails` makes one call fail, as a process that dies there would."""

    fails = ""

    async def commit(self, consumed: Any, fence: int) -> None:
        if self.fails == "commit" and consumed:
            raise ConnectionError("died here")
        await super().commit(consumed, fence)

    async def close(self) -> None:
        pass


@pytest.fixture(params=["memory", "redis"])
def reopen(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Return what opens one and the same State again and again."""
    run = uuid.uuid4().hex
    survivor = Survivor(100)

    async def opener() -> State[StoredItem]:
        if request.param == "memory":
            return survivor
        return await open_state(request.getfixturevalue("redis_server").url, run, 100, compress="none")

    return opener


async def begin(api: Any, make_group: Make, groups: int = 6) -> int:
    await api.register(4)
    await api.batch()
    env = int((await api.register_env(2))["env_id"])
    for first in range(1, groups + 1):
        await api.post("/scored_data", make_group(first, env_id=env))
    return env


async def test_an_unacknowledged_batch_comes_again(reopen: Any, open_api: Any, make_group: Make) -> None:
    async with open_api(await reopen()) as api:
        env = await begin(api, make_group)
        assert await api.batch() == [1, 2]
        assert await api.batch() == [3, 4]
        assert (await api.get("/status"))["current_step"] == 2
    async with open_api(await reopen()) as api:
        # Neither trainer nor environment has to register again.
        assert await api.get("/status") == {"current_step": 1, "queue_size": 4}
        assert (await api.get("/status-env", {"env_id": env}))["self_queue_size"] == 4
        await api.post("/scored_data", make_group(1, env_id=env))  # its acknowledgement was lost: already trained
        assert [await api.batch() for _ in range(3)] == [[3, 4], [5, 6], None]
        assert (await api.register_env())["wandb_name"] == "env_1"
        assert (await api.get("/status"))["current_step"] == 3


async def test_two_batches_outlive_two_restarts(reopen: Any, open_api: Any, make_group: Make) -> None:
    seen = []
    for turn in range(3):
        async with open_api(await reopen()) as api:
            if turn == 0:
                await begin(api, make_group, 4)
            seen.append(await api.batch())
    assert seen == [[1, 2], [1, 2], [1, 2]]
    async with open_api(await reopen()) as api:
        assert [await api.batch() for _ in range(3)] == [[1, 2], [3, 4], None]


async def test_a_commit_cut_short_is_finished_and_counted_once(open_api: Any, make_group: Make) -> None:
    state = Survivor(100)
    async with open_api(state) as api:
        await begin(api, make_group)
        assert await api.batch() == [1, 2]
        state.fails = "commit"
        status, _ = await api.call("GET", "/batch")
        assert status != 200
    state.fails = ""
    async with open_api(state) as api:
        assert await api.get("/status") == {"current_step": 1, "queue_size": 4}
        assert await api.batch() == [3, 4]


async def test_groups_leased_but_not_given_out_keep_their_place(reopen: Any, open_api: Any, make_group: Make) -> None:
    async with open_api(await reopen()) as api:
        await api.register(4)
        for first, size in ((1, 3), (2, 2), (3, 2), (4, 1)):
            await api.post("/scored_data", make_group(first, size))
        assert await api.batch() == [2, 3]  # 1 was leased on the way to them
    async with open_api(await reopen()) as api:
        await api.register(4)
        assert [await api.batch() for _ in range(2)] == [[2, 3], [1, 4]]


@pytest.mark.parametrize("call", ["register", "reset", "fence", "fence again"])
async def test_an_api_that_ends_while_a_trainer_takes_over_comes_up_again(
    open_api: Any, make_group: Make, call: str
) -> None:
    class Ends(Survivor):
        ends = False

        async def fence(self) -> int:
            epoch = await super().fence()
            if self.ends:
                raise ConnectionError("died here")
            return epoch

    state = Ends(100)
    async with open_api(state) as api:
        await begin(api, make_group, 2)
        assert await api.batch() == [1, 2]
        if call == "fence again":
            await api.post("/tinker-atropos/fence", {})
        state.ends = True
        if call == "register":
            with pytest.raises(AssertionError):
                await api.register(4)
        elif call == "reset":
            assert (await api.call("GET", "/reset_data"))[0] != 200
        else:
            assert (await api.call("POST", "/tinker-atropos/fence", {}))[0] != 200
    state.ends = False
    async with open_api(state) as api:
        if call == "fence again":
            assert (await api.call("GET", "/batch"))[0] == 409
            await api.register(4)
        assert await api.batch() == [1, 2]


async def test_of_two_apis_over_one_run_the_older_answers_no_more(reopen: Any, open_api: Any, make_group: Make) -> None:
    async with open_api(await reopen()) as older:
        await begin(older, make_group, 4)
        assert await older.batch() == [1, 2]
        async with open_api(await reopen()) as newer:
            assert await newer.batch() == [1, 2]
            for _ in range(2):
                assert (await older.call("GET", "/batch"))[0] == 409
            older.clock.now += 2
            assert (await older.call("POST", "/scored_data", make_group(9)))[0] == 409
            with pytest.raises(AssertionError, match="another API"):
                await older.register(4)
            assert await newer.batch() == [3, 4]
            assert await newer.batch() is None


async def test_a_lease_whose_answer_never_left_is_given_again(reopen: Any, open_api: Any, make_group: Make) -> None:
    async with open_api(await reopen()) as api:
        for first in (1, 2, 3, 4):
            await api.post("/scored_data", make_group(first))
        fence = (await api.post("/tinker-atropos/fence", {}))["fence"]
        lease = api.backend._state.lease

        async def leases_and_dies(*arguments: Any, **settings: Any) -> None:
            await lease(*arguments, **settings)
            raise ConnectionError("died here")

        api.backend._state.lease = leases_and_dies
        asked = {"n": 3, "fence": fence, "key": "k", "wait": 5}
        assert (await api.call("POST", "/tinker-atropos/lease", asked))[0] != 200
        api.backend._state.lease = lease
    async with open_api(await reopen()) as api:
        for _ in range(2):
            async with api.session.post(api.url + "/tinker-atropos/lease", json=asked) as answer:
                assert answer.status == 200
                items = msgspec.msgpack.decode(await answer.read())
            found = [json_of(StoredItem(id, kind, body, meta)) for id, kind, meta, body in items]
            assert [decode_group(body).tokens[0][0] for body in found] == [1, 2, 3]
        more = {"n": 1, "fence": fence, "key": "l", "wait": 5}
        async with api.session.post(api.url + "/tinker-atropos/lease", json=more) as answer:
            assert len(msgspec.msgpack.decode(await answer.read())) == 1
        await api.post("/tinker-atropos/rewind", {"fence": fence})
        assert (await api.get("/tinker-atropos/status"))["waiting_sequences"] == 8


# Against processes that are killed.


@pytest.fixture
def run_api() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Start `tinker-atropos run-api` on a free port; returns the process and its URL."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-m", "tinker_atropos", "run-api", "--port", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on "), line
        return process, line.split()[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


async def test_what_waits_in_memory_ends_with_the_process(run_api: Any, make_group: Make) -> None:
    """Memory promises no more than a process: after kill -9 the API is empty, and says to register."""
    import aiohttp

    process, url = run_api()
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/scored_data", json=make_group(1)) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGKILL)
        process.wait()
        _, url = run_api()
        async with session.get(f"{url}/status") as answer:
            assert (await answer.json())["queue_size"] == 0
        async with session.get(f"{url}/batch") as answer:
            assert (await answer.json())["status"] == "error"


async def test_redis_loses_no_batch_over_kills(run_api: Any, redis_server: Any, make_group: Make) -> None:
    import random

    import aiohttp

    draw = random.Random(0)
    arguments = ("--state", redis_server.url, "--run", f"test-{uuid.uuid4().hex}", "--cap", "20", "--hold", "1")
    place = list(run_api(*arguments))
    given: list[list[int]] = []
    total = 40

    async def asked(method: str, path: str, body: Any = None) -> Any:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.request(method, place[1] + path, json=body) as answer:
                    if answer.status == 200:
                        return await answer.json()
            await asyncio.sleep(0.05)

    async def post(firsts: range) -> None:
        for first in firsts:
            await asked("POST", "/scored_data", make_group(first))

    async def kill() -> None:
        for _ in range(4):
            await asyncio.sleep(draw.uniform(0.5, 1.5))
            place[0].kill()
            place[0].wait()
            place[:] = await asyncio.to_thread(run_api, *arguments)

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        trainer = {
            **{"wandb_group": "g", "wandb_project": "p", "batch_size": 4, "max_token_len": 512},
            **{"checkpoint_dir": "", "save_checkpoint_interval": 1, "starting_step": 0, "num_steps": 100},
        }
        await asked("POST", "/register", trainer)
        posting = asyncio.gather(post(range(0, total, 2)), post(range(1, total, 2)))
        killing = asyncio.ensure_future(kill())
        while True:
            done = posting.done() and killing.done()
            batch = (await asked("GET", "/batch"))["batch"]
            if batch is not None:
                firsts = [group["tokens"][0][0] for group in batch]
                if not given or given[-1] != firsts:  # a batch that was not acknowledged came again
                    given.append(firsts)
            elif done:
                break
            await asyncio.sleep(0.05)
        await asyncio.gather(posting, killing)
    assert sorted(first for batch in given for first in batch) == list(range(total))
