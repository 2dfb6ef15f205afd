from __future__ import annotations

import asyncio
import logging

import pytest
from tinker_atropos_tinker.local import _say_message
from tinker_atropos_tinker.service_log import LOGGER, Reporter, _RetryListener, forward_warnings


async def test_a_wait_that_lasts_is_named() -> None:
    said: asyncio.Queue[str] = asyncio.Queue()
    reporter = Reporter(said.put_nowait, quiet=0.0)
    waiting = asyncio.create_task(reporter.told(asyncio.sleep(3600), "optim_step of step 3"))
    assert "waiting for optim_step of step 3" in await asyncio.wait_for(said.get(), 30)
    waiting.cancel()


async def test_what_is_awaited_comes_back_and_so_do_its_errors() -> None:
    reporter = Reporter(print)

    async def fail() -> None:
        raise KeyError("x")

    assert await reporter.told(asyncio.sleep(0, "done"), "a") == "done"
    with pytest.raises(KeyError):
        await reporter.told(fail(), "a")


async def test_a_cancellation_reaches_what_is_awaited() -> None:
    reached = asyncio.Event()

    async def sleep() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            reached.set()
            raise

    waiting = asyncio.create_task(Reporter(print).told(sleep(), "a"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait_for(reached.wait(), 10)


async def test_a_wait_ends_where_it_makes_no_sense_any_more() -> None:
    def look() -> None:
        raise RuntimeError("the server is gone")

    with pytest.raises(RuntimeError, match="gone"):
        await Reporter(print).told(asyncio.sleep(3600), "a", look)


async def test_a_queue_pause_is_said_once_and_so_is_its_end() -> None:
    lines: list[str] = []
    reporter = Reporter(lines.append)
    reporter.queue_state("training", "active", None)
    reporter.queue_state("training", "paused_capacity", "short on capacity")
    reporter.queue_state("training", "paused_capacity", "short on capacity")
    reporter.queue_state("training", "active", None)
    await asyncio.sleep(0)
    assert lines == ["training is paused by the service (short on capacity)", "training goes on"]


async def test_retries_are_shown_with_their_cause() -> None:
    lines: list[str] = []
    listener = _RetryListener(Reporter(lines.append))  # type: ignore[no-untyped-call,unused-ignore]
    listener.log(
        "x", {"func": "A.b.<locals>._send_request", "is_retryable": True, "status_code": 429, "elapsed_time": 2.0}
    )
    listener.log("x", {"is_retryable": False, "status_code": 400})
    await asyncio.sleep(0)
    assert lines == ["tinker: send_request failed (HTTP 429), trying again, 2 s so far"]


async def test_a_long_poll_that_came_back_empty_is_no_failure() -> None:
    lines: list[str] = []
    listener = _RetryListener(Reporter(lines.append))
    data = {"should_retry": True, "request_type": "OptimStep", "status_code": 408, "elapsed_time": 30.0}
    listener.log("APIFuture.result_async.api_status_error", data)
    await asyncio.sleep(0)
    assert lines == []


async def test_the_sdk_s_warnings_are_shown_but_not_its_noise() -> None:
    lines: list[str] = []
    with forward_warnings(Reporter(lines.append)):
        logging.getLogger("tinker.lib.x").warning("The job is paused due to billing status")
        logging.getLogger("tinker.lib.y").warning("Retrying request because of try_again")
        LOGGER.info("nothing")
    logging.getLogger("tinker.lib.z").warning("afterwards")
    await asyncio.sleep(0)
    assert lines == ["tinker: The job is paused due to billing status"]


def test_the_local_server_s_log_is_shown_without_heads_and_bars() -> None:
    lines: list[str] = []
    for line in ("2026-01-01 00:00:00,112 INFO a.b: loading m", "", "Loading weights:  10%|#  | 1/10"):
        _say_message(line, lines.append)
    assert lines == ["loading m"]
