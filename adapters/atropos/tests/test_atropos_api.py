"""The thirteen endpoints, and each defect of the original's that ours must not have."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from tinker_atropos_atropos import roster
from tinker_atropos_atropos.api import ApiSettings
from tinker_atropos_atropos.posted import Refused
from tinker_atropos_atropos.state_backend import BLOCKED

Make = Callable[..., dict[str, Any]]


async def start(api: Any, batch_size: int = 4, **env: Any) -> int:
    """Register a trainer that has asked once, and an environment; return its number."""
    await api.register(batch_size)
    assert await api.batch() is None
    return int((await api.register_env(**env))["env_id"])


async def test_answers_of_the_protocol(api: Any) -> None:
    assert await api.get("/") == {"message": "AtroposLib API"}
    assert await api.get("/wandb_info") == {"group": None, "project": None}
    assert await api.get("/info") == {"batch_size": -1, "max_token_len": -1}
    assert await api.get("/status") == {"current_step": 0, "queue_size": 0}
    assert await api.register_env() == {"status": "wait for trainer to start"}
    registered = await api.register(8, starting_step=3)
    assert isinstance(registered["uuid"], int)
    assert await api.register_env() == {"status": "wait for trainer to start"}
    assert await api.get("/batch") == {"batch": None}
    assert await api.register_env() == {
        **{"status": "success", "env_id": 0, "wandb_name": "env_0", "checkpoint_dir": "/tmp/x"},
        **{"starting_step": 3, "checkpoint_interval": 10, "num_steps": 100},
    }
    assert (await api.register_env())["wandb_name"] == "env_1"
    assert await api.get("/wandb_info") == {"group": "group", "project": "project"}
    assert await api.get("/info") == {"batch_size": 8, "max_token_len": 512}
    assert await api.post("/disconnect-env", {"env_id": 0}) == {"status": "success"}
    assert await api.get("/status-env", {"env_id": 1}) == {
        **{"current_step": 3, "queue_size": 0, "unallocated_fraction": 1.0, "self_queue_size": 0},
        **{"max_group_size": 1, "env_weight": 1.0},
    }
    assert (await api.get("/latest_example"))["tokens"] == []
    status, text = await api.call("GET", "/reset_data")
    assert (status, text) == (200, "Reset successful")
    assert await api.get("/info") == {"batch_size": -1, "max_token_len": -1}


async def test_a_gzipped_post_comes_out_of_the_batch_as_it_went_in(api: Any, make_group: Make, packed: Any) -> None:
    env = await start(api, 2)
    sent = make_group(5, env_id=env, messages=[[{"role": "user", "content": "é" * 2000, "reward": None}]] * 2)
    answer = await api.post("/scored_data", packed(sent), headers={"Content-Encoding": "gzip"})
    assert answer == {"status": "received"}
    (out,) = (await api.get("/batch"))["batch"]
    assert {key: out[key] for key in sent} == sent
    assert out["overrides"] is None
    assert (await api.get("/latest_example"))["messages"] == sent["messages"]


async def test_batches_are_first_in_first_out_and_one_step_each(api: Any, make_group: Make) -> None:
    await start(api)
    for first in range(1, 7):
        await api.post("/scored_data", make_group(first))
    assert [await api.batch() for _ in range(3)] == [[1, 2], [3, 4], [5, 6]]
    assert await api.get("/status") == {"current_step": 3, "queue_size": 0}
    assert await api.batch() is None


async def test_a_lost_batch_comes_again(api: Any, make_group: Make) -> None:
    await start(api, 200)
    content = [[{"role": "user", "content": "x" * 300_000}]] * 2
    for first in range(100):
        body = json.dumps(make_group(first, messages=content)).encode()
        await api.post("/scored_data", body)
    where = urlsplit(api.url)
    # A client that asks and goes away without reading: the socket's buffers hold but a part of the batch.
    gone = socket.create_connection((where.hostname, where.port))
    gone.sendall(b"GET /batch HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    await asyncio.sleep(0.5)
    gone.close()
    for _ in range(200):
        await asyncio.sleep(0.02)
        if api.backend.counts["undelivered"]:
            break
    assert (await api.get("/status"))["queue_size"] == 100
    assert await api.batch() == list(range(100))
    assert (await api.get("/status"))["current_step"] == 1


async def test_a_second_register_takes_over_with_what_was_not_acknowledged(api: Any, make_group: Make) -> None:
    env = await start(api)
    for first in range(1, 7):
        await api.post("/scored_data", make_group(first, env_id=env))
    assert await api.batch() == [1, 2]
    assert await api.batch() == [3, 4]  # acknowledges the first
    await api.register(2, starting_step=1)
    assert await api.get("/status") == {"current_step": 1, "queue_size": 4}
    assert await api.get("/info") == {"batch_size": 2, "max_token_len": 512}
    assert [await api.batch() for _ in range(5)] == [[3], [4], [5], [6], None]
    assert (await api.get("/status-env", {"env_id": env}))["current_step"] == 5


async def test_a_smaller_batch_discards_what_never_fits_and_says_who(api: Any, make_group: Make) -> None:
    await start(api, 4, group_size=4)
    await api.post("/scored_data", make_group(1, 4))
    said = await api.register(2)
    assert "never sum to a batch of 2" in said["warnings"][0]
    assert (await api.get("/status"))["queue_size"] == 0
    assert api.backend.counts["discarded: larger than the batch"] == 1


async def test_data_before_the_trainer_waits_for_it(api: Any, make_group: Make) -> None:
    await api.post("/scored_data", make_group(1))
    assert (await api.get("/batch"))["status"] == "error"
    await api.register(2)
    assert await api.batch() == [1]


async def test_batch_without_a_trainer_is_the_protocol_s_error_and_starts_nothing(api: Any) -> None:
    for _ in range(2):
        assert await api.get("/batch") == {
            **{"status": "error", "message": "Trainer not registered. Call /register first."},
            "batch": [],
        }
        assert await api.register_env() == {"status": "wait for trainer to start"}
        await api.register()
        await api.get("/reset_data")


async def test_sizes_that_never_fit_are_said_at_once(api: Any, make_group: Make) -> None:
    await start(api, 4)
    for size, said in ((8, "a group of 8 never fits a batch of 4"), (3, "never sum to a batch of 4")):
        asked = {"max_token_length": 9, "desired_name": "x", "weight": 1.0, "group_size": size}
        status, answer = await api.call("POST", "/register-env", asked)
        assert status == 422
        assert answer["detail"][0]["loc"] == ["body", "group_size"]
        assert said in answer["detail"][0]["msg"]
    status, answer = await api.call("POST", "/scored_data", make_group(1, 5))
    assert status == 422
    assert "never fits" in answer["detail"][0]["msg"]
    # Beside groups of 1 those of 3 fit: 3 + 1.
    assert (await api.register_env(1))["status"] == "success"
    assert (await api.register_env(3))["status"] == "success"


async def test_mixed_sizes_do_not_deadlock(api: Any, make_group: Make) -> None:
    await start(api, 6, group_size=2)
    for first, size in ((1, 3), (2, 2), (3, 2), (4, 2), (5, 3)):
        await api.post("/scored_data", make_group(first, size))
    # The first four hold a batch without the oldest; then 3 and 3 make one.
    assert await api.batch() == [2, 3, 4]
    assert await api.batch() == [1, 5]


async def test_odd_sizes_are_answered_as_buffered_and_are_not_kept_back(api: Any, make_group: Make) -> None:
    env = await start(api, 8, group_size=4)
    assert await api.post("/scored_data", make_group(1, 3, env_id=env)) == {"status": "buffered", "buffer_size": 3}
    assert await api.post("/scored_data", make_group(2, 1, env_id=env)) == {"status": "buffered", "buffer_size": 0}
    # 3 and 3 never sum to 4, and yet are no loss.
    answer = await api.post("/scored_data_list", [make_group(3, 3, env_id=env), make_group(4, 1, env_id=env)])
    assert answer == {"status": "received", "groups_processed": 2, "buffered": 2, "last_buffer_size": 0}
    assert await api.batch() == [1, 2, 3, 4]


@pytest.mark.parametrize("score", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_score_that_is_no_number_is_refused_and_poisons_nothing(api: Any, make_group: Make, score: str) -> None:
    await start(api)
    await api.post("/scored_data", make_group(1))
    bad = json.dumps(make_group(9)).replace('"scores": [0.0', f'"scores": [{score}').encode()
    for path, body in (("/scored_data", bad), ("/scored_data_list", b"[" + bad + b"]")):
        status, answer = await api.call("POST", path, body)
        assert status == 422
        assert "scores[0]" in answer["detail"][0]["msg"]
    await api.post("/scored_data", make_group(2))
    assert await api.batch() == [1, 2]


async def test_a_list_with_one_bad_group_takes_none_of_it(api: Any, make_group: Make) -> None:
    await start(api)
    status, answer = await api.call("POST", "/scored_data_list", [make_group(1), make_group(2, scores=[1.0])])
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", 1, "scores"])
    assert (await api.get("/status"))["queue_size"] == 0


async def test_a_silent_environment_with_a_minimum_blocks_nobody(open_api: Any, make_group: Make) -> None:
    async with open_api(patience=60.0) as api:
        fast = await start(api, 4)
        slow = (await api.register_env(min_batch_allocation=0.5))["env_id"]
        for first in (1, 2, 3, 4):
            await api.post("/scored_data", make_group(first, env_id=fast))
        assert await api.batch() is None  # its minimum is waited for …
        await api.post("/scored_data", make_group(9, env_id=slow))
        assert await api.batch() == [1, 9]
        assert await api.batch() is None
        api.clock.now += 61  # … until it has been silent too long
        assert await api.batch() == [2, 3]


async def test_a_minimum_is_not_waited_for_at_the_cap_nor_after_a_farewell(open_api: Any, make_group: Make) -> None:
    async with open_api(cap=3, settings=ApiSettings(hold=0.05)) as api:
        fast = await start(api, 4)
        slow = (await api.register_env(min_batch_allocation=0.5))["env_id"]
        for first in (1, 2):
            await api.post("/scored_data", make_group(first, env_id=fast))
        assert await api.batch() is None
        await api.post("/scored_data", make_group(3, env_id=fast))
        assert await api.batch() == [1, 2]
        await api.post("/disconnect-env", {"env_id": slow})
        assert await api.batch() is None
        await api.post("/scored_data", make_group(4, env_id=fast))
        assert await api.batch() == [3, 4]


async def test_minimums_come_first_within_a_batch(api: Any, make_group: Make) -> None:
    fast = await start(api, 8)
    slow = (await api.register_env(min_batch_allocation=0.5))["env_id"]
    for first in range(1, 7):
        await api.post("/scored_data", make_group(first, env_id=fast))
    for first in (11, 12, 13):
        await api.post("/scored_data", make_group(first, env_id=slow))
    assert await api.batch() == [1, 2, 11, 12]
    status = await api.get("/status-env", {"env_id": slow})
    assert (status["self_queue_size"], status["unallocated_fraction"]) == (1, 0.5)


async def test_a_silent_environment_counts_no_more_until_its_next_poll(api: Any, make_group: Make) -> None:
    ghost = await start(api, 4, min_batch_allocation=0.5)
    api.clock.now += 40
    env = (await api.register_env(min_batch_allocation=1.0))["env_id"]
    status = await api.get("/status-env", {"env_id": env})
    assert (status["env_weight"], status["unallocated_fraction"]) == (0.5, 0.0)
    api.clock.now += 40  # the first script was started anew, and never said farewell
    status = await api.get("/status-env", {"env_id": env})
    assert (status["env_weight"], status["unallocated_fraction"]) == (1.0, 0.0)
    assert (await api.get("/tinker-atropos/status"))["environments"] == 1
    assert (await api.get("/status-env", {"env_id": ghost}))["env_weight"] == 0.5
    assert (await api.get("/status-env", {"env_id": env}))["env_weight"] == 0.5


def test_the_roster_forgets_the_silent_and_no_number_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "MAX_ENVIRONMENTS", 3)
    now = [0.0]
    known = roster.Roster(60.0, lambda: now[0])
    asked = roster.RegisterEnv(max_token_length=9, group_size=1, desired_name="x")
    for _ in range(3):
        known.admit(asked)
    with pytest.raises(Refused, match="3 environments take part"):
        known.admit(asked)
    now[0] = 61.0
    known.heard(0)
    assert [known.admit(asked).real_name for _ in range(2)] == ["x_3", "x_4"]
    assert [environment.number for environment in known.environments] == [0, 3, 4]
    assert known.find(1) is None
    known.heard(1)
    known.restore(None, known.environments)
    now[0] = 122.0
    assert (known.admit(asked).real_name, known.find(5) is not None) == ("x_5", True)


async def test_status_env_counts_others_also_at_group_size_one(api: Any, make_group: Make) -> None:
    one = await start(api, 4, group_size=1)
    other = (await api.register_env(1))["env_id"]
    for first in range(3):
        await api.post("/scored_data", make_group(first, 1, env_id=other))
    assert (await api.get("/status-env", {"env_id": one}))["queue_size"] == 3
    assert (await api.get("/status-env", {"env_id": one}))["self_queue_size"] == 0
    assert (await api.get("/status-env", {"env_id": other}))["self_queue_size"] == 3


async def test_polls_about_what_is_not_there_are_refused_and_never_fail(api: Any) -> None:
    bodies: list[Any] = [{"env_id": 0}, {"env_id": -1}, {"env_id": 10**30}, {}, None, [], "x"]
    for body in bodies:
        status, _ = await api.call("GET", "/status-env", body)
        assert status == 422
    env = await start(api)
    await api.post("/disconnect-env", {"env_id": env})
    assert (await api.get("/status-env", {"env_id": env}))["env_weight"] == 0.01
    for number in (-1, 7):
        assert (await api.post("/disconnect-env", {"env_id": number}))["status"] == "failure"
    status, answer = await api.call("GET", "/status-env", {"env_id": 1})
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", "env_id"])


async def test_an_environment_without_a_name_gets_one(api: Any) -> None:
    await start(api)
    assert (await api.register_env(desired_name=None))["wandb_name"] == "env_1"


@pytest.mark.parametrize(
    "changes", [{"weight": -1}, {"weight": "x"}, {"group_size": 0}, {"min_batch_allocation": 1.5}, {"group_size": None}]
)
async def test_a_wrong_registration_of_an_environment_is_named(api: Any, changes: dict[str, Any]) -> None:
    await start(api)
    asked = {"max_token_length": 9, "desired_name": "x", "weight": 1.0, "group_size": 2} | changes
    status, answer = await api.call("POST", "/register-env", asked)
    assert (status, answer["detail"][0]["loc"]) == (422, ["body", *changes])


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"batch_size": 10**12}, {"starting_step": -1}, {"num_steps": "x"}]
)
async def test_a_wrong_registration_of_a_trainer_is_named(api: Any, changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match=next(iter(changes))):
        await api.register(**{"batch_size": 4} | changes)
    assert (await api.get("/info"))["batch_size"] == -1


async def test_broken_and_boundless_bodies(open_api: Any, make_group: Make, packed: Any) -> None:
    async with open_api(settings=ApiSettings(max_body=20_000, max_plain=50_000)) as api:
        await api.register()
        gz = {"Content-Encoding": "gzip"}
        whole = packed(make_group(1))
        for body in (whole[:-4], b"\x1f\x8b" + b"x" * 50, b"plain"):
            assert (await api.call("POST", "/scored_data", body, headers=gz))[0] == 400
        assert (await api.call("POST", "/scored_data", gzip.compress(bytes(10**6)), headers=gz))[0] == 413
        assert (await api.call("POST", "/scored_data", b"x" * 30_000))[0] == 413
        assert (await api.call("POST", "/scored_data", whole, headers={"Content-Encoding": "br"}))[0] == 415
        assert (await api.call("POST", "/register", b" " * 19_000 + b"{"))[0] == 422
        assert (await api.call("POST", "/nowhere", b""))[0] == 404
        assert (await api.call("HEAD", "/batch"))[0] == 405
        await api.post("/scored_data", whole, headers=gz)


async def test_a_post_repeated_is_taken_once(api: Any, make_group: Make, packed: Any) -> None:
    await start(api)
    sent = make_group(1)
    for body, headers in ((sent, {}), (sent, {}), (packed(sent), {"Content-Encoding": "gzip"})):
        assert await api.post("/scored_data", body, headers=headers) == {"status": "received"}
    two = [make_group(2), make_group(2)]  # equal groups of one list are two
    for _ in range(2):
        await api.post("/scored_data_list", two)
    for _ in range(2):
        await api.post("/scored_data", make_group(3), headers={"Idempotency-Key": "mine"})
    await api.post("/scored_data", make_group(3), headers={"Idempotency-Key": "another"})
    assert (await api.get("/status"))["queue_size"] == 5
    assert api.backend.counts["duplicates"] == 5
    assert await api.batch() == [1, 2]
    await api.post("/scored_data", sent)  # also once it has gone out
    assert (await api.get("/status"))["queue_size"] == 3
    await api.get("/reset_data")
    await api.post("/scored_data", sent)
    assert (await api.get("/status"))["queue_size"] == 1


async def test_equal_content_is_another_group_after_the_window(open_api: Any, make_group: Make) -> None:
    async with open_api(repeat_window=60.0) as api:
        await start(api)
        for seconds, waiting in ((0, 1), (50, 1), (9, 1), (2, 2), (59, 2), (2, 3)):
            api.clock.now += seconds
            await api.post("/scored_data", make_group(1))
            assert (await api.get("/status"))["queue_size"] == waiting
        assert (await api.get("/tinker-atropos/status"))["counts"]["duplicates"] == 3
        for seconds, waiting in ((0, 5), (59, 5), (2, 7)):
            api.clock.now += seconds
            await api.post("/scored_data_list", [make_group(2), make_group(2)])
            assert (await api.get("/status"))["queue_size"] == waiting
        for _ in range(2):  # a key is kept longer
            await api.post("/scored_data", make_group(3), headers={"Idempotency-Key": "mine"})
            api.clock.now += 61
        assert (await api.get("/status"))["queue_size"] == 8
        assert len(api.backend._repeats) <= 3


async def test_at_the_cap_a_post_waits_then_is_told_to_come_again(open_api: Any, make_group: Make) -> None:
    async with open_api(cap=2, settings=ApiSettings(hold=0.2)) as api:
        await start(api, 2)
        for first in (1, 2):
            await api.post("/scored_data", make_group(first))
        async with api.session.post(api.url + "/scored_data", data=json.dumps(make_group(3))) as answer:
            assert answer.status == 503
            assert int(answer.headers["Retry-After"]) > 0
            assert "2 groups are held and 2 may be" in (await answer.json())["detail"]
        waiting = asyncio.create_task(api.call("POST", "/scored_data", make_group(3)))
        assert await api.batch() == [1]
        assert await api.batch() == [2]  # commits the first: there is room
        assert (await waiting)[0] == 200
        assert await api.batch() == [3]


async def test_no_more_posts_have_a_place_than_may_wait(open_api: Any, make_group: Make) -> None:
    async with open_api(cap=2, settings=ApiSettings(hold=30.0)) as api:
        await start(api, 2)
        for first in (1, 2):
            await api.post("/scored_data", make_group(first))
        posts = [asyncio.create_task(api.call("POST", "/scored_data", make_group(9 + n))) for n in range(90)]
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if len(api.backend._putting) == BLOCKED:
                break
        await asyncio.sleep(0.2)  # those that have none might still come
        assert (len(api.backend._putting), api.backend._posts) == (BLOCKED, BLOCKED)
        seen: list[int] = []
        while len(seen) < 92:
            seen += await api.batch() or []
        assert [status for status, _ in await asyncio.gather(*posts)] == [200] * 90
        assert sorted(seen) == [1, 2, *range(9, 99)]
        assert api.backend._posts == 0


async def test_bytes_are_capped_too(open_api: Any, make_group: Make) -> None:
    async with open_api(cap_bytes=300, settings=ApiSettings(hold=0.1)) as api:
        await api.register(2)
        await api.post("/scored_data", make_group(1))
        taken = [(await api.call("POST", "/scored_data", make_group(first)))[0] for first in range(2, 6)]
        assert taken[0] == 200
        assert taken[-1] == 503


async def test_a_batch_that_the_cap_can_not_hold_is_said_at_registration(open_api: Any) -> None:
    async with open_api(cap=2) as api:
        await api.register(8)
        await api.batch()
        asked = {"max_token_length": 9, "desired_name": "x", "weight": 1.0, "group_size": 2}
        status, answer = await api.call("POST", "/register-env", asked)
        assert status == 422
        assert "--cap 8" in answer["detail"][0]["msg"]


async def test_many_at_once_lose_and_double_nothing(api: Any, make_group: Make) -> None:
    await start(api, 8)
    firsts = list(range(100))
    await asyncio.gather(*(api.post("/scored_data", make_group(first)) for first in firsts for _ in range(2)))
    batches = [batch for batch in await asyncio.gather(*(api.batch() for _ in range(40))) if batch]
    while batch := await api.batch():
        batches.append(batch)
    assert sorted(first for batch in batches for first in batch) == firsts
    assert all(len(batch) == 4 for batch in batches)


async def test_a_token_is_wanted_and_unchanged_clients_can_give_it(open_api: Any) -> None:
    token = "0123456789abcdef0123"
    async with open_api(settings=ApiSettings(token=token)) as api:
        assert (await api.call("GET", "/info"))[0] == 401
        for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": "Basic !!"}, {"Authorization": token}):
            assert (await api.call("GET", "/info", headers=headers))[0] == 401
        assert (await api.call("GET", "/info", headers={"Authorization": f"Bearer {token}"}))[0] == 200
        api.url = api.url.replace("http://", f"http://:{token}@")
        assert (await api.call("GET", "/info"))[0] == 200


async def test_other_names_and_other_pages_are_not_answered(api: Any) -> None:
    assert (await api.call("GET", "/info", headers={"Host": "evil.example"}))[0] == 403
    assert (await api.call("GET", "/reset_data", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 403


async def test_no_poll_walks_the_line(api: Any, make_group: Make) -> None:
    env = await start(api)
    await api.post("/scored_data", make_group(1, env_id=env))

    class Unwalked(dict[str, Any]):
        def __iter__(self) -> Any:
            raise AssertionError("the line was walked")

        values = items = keys = __iter__

    api.backend._line._groups = Unwalked(api.backend._line._groups)
    assert (await api.get("/status"))["queue_size"] == 1
    assert (await api.get("/status-env", {"env_id": env}))["self_queue_size"] == 1
    assert await api.batch() is None  # too few to look
