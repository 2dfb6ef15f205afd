"""Workers that hostile input can't hang, fill or fool; the functions they call stand in `graders.py`, written here."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos import RunError
from tinker_atropos.grading import Limits, WorkerPool

GRADERS = """
import os, signal, sys, time

kept = []

def double(n):
    return 2 * n

def process(question):
    return os.getpid()

def hostile(kind):
    if kind == "spin":
        while True: pass
    if kind == "one C call":
        return len(str(9 ** 9 ** 8)) and 0
    if kind == "sleep":
        time.sleep(3600)
    if kind == "memory":
        return len([bytearray(2**20) for _ in range(2**20)])
    if kind == "raise":
        raise KeyError("no")
    if kind == "exit":
        raise SystemExit(3)
    if kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "print":
        print("[1, 2]", flush=True)
        os.write(1, b"[1, 2]\\n")
    if kind == "keep":
        kept.append(bytearray(b"x" * 160 * 2**20))
    return "graded"
"""


@pytest.fixture
async def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., WorkerPool]]:
    (tmp_path / "graders.py").write_text(GRADERS)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    pools: list[WorkerPool] = []

    def make(name: str, workers: int = 2, **limits: Any) -> WorkerPool:
        pools.append(WorkerPool(f"graders:{name}", workers=workers, limits=Limits(**limits)))
        return pools[-1]

    yield make
    for made in pools:
        await made.close()


async def test_every_call_is_answered_with_its_own_result(pool: Callable[..., WorkerPool]) -> None:
    doubles = pool("double")
    assert await asyncio.gather(*(doubles.call(n) for n in range(500))) == [2 * n for n in range(500)]
    assert doubles.restarts == 0


async def test_workers_last_from_call_to_call(pool: Callable[..., WorkerPool]) -> None:
    one = pool("process", workers=1)
    assert len({await one.call(None) for _ in range(50)}) == 1


@pytest.mark.parametrize("kind", ["spin", "one C call", "memory", "raise", "exit", "die", "sleep"])
async def test_a_hostile_call_is_none_and_those_beside_it_are_answered(
    pool: Callable[..., WorkerPool], kind: str
) -> None:
    grading = pool("hostile", cpu_seconds=0.3, wall_seconds=2.0 if kind == "sleep" else 60.0, memory_bytes=2**28)
    kinds = ["fine", kind, "fine", "fine", kind, "fine"]
    answers = await asyncio.gather(*(grading.call(kind) for kind in kinds))
    assert answers == ["graded" if kind == "fine" else None for kind in kinds]


async def test_what_the_function_prints_is_no_answer(pool: Callable[..., WorkerPool]) -> None:
    grading = pool("hostile", workers=1)
    assert [await grading.call("print"), await grading.call("fine")] == ["graded", "graded"]


async def test_a_worker_that_keeps_memory_is_replaced_without_losing_a_call(pool: Callable[..., WorkerPool]) -> None:
    grading = pool("hostile", workers=1, memory_bytes=2**29)
    assert await asyncio.gather(*(grading.call("keep") for _ in range(7))) == ["graded"] * 7
    assert grading.restarts == 0


async def test_a_worker_killed_between_two_calls_costs_no_answer(pool: Callable[..., WorkerPool]) -> None:
    one = pool("process", workers=1)
    first = await one.call(None)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    second = await one.call(None)
    assert second is not None
    assert second != first


async def test_a_call_larger_than_a_pipe_goes_through(pool: Callable[..., WorkerPool]) -> None:
    doubles = pool("double")
    assert await asyncio.gather(*(doubles.call("x" * 1_000_000) for _ in range(4))) == ["x" * 2_000_000] * 4


async def test_a_pool_may_be_used_again_after_it_was_closed_and_from_another_loop(
    pool: Callable[..., WorkerPool],
) -> None:
    doubles = pool("double")
    assert await doubles.call(1) == 2
    await doubles.close()
    assert await asyncio.to_thread(lambda: asyncio.run(doubles.call(2))) == 4


async def test_closing_answers_what_is_under_way_and_leaves_no_process(pool: Callable[..., WorkerPool]) -> None:
    pids = pool("process", workers=1)
    pid = await pids.call(None)
    assert pid is not None
    grading = pool("hostile", workers=1)
    waiting = [asyncio.create_task(grading.call("sleep")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await grading.close()
    assert await asyncio.gather(*waiting) == [None, None, None]
    await pids.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_cancelled_call_harms_no_other(pool: Callable[..., WorkerPool]) -> None:
    doubles = pool("double", workers=1)
    calls = [asyncio.create_task(doubles.call(n)) for n in range(20)]
    await asyncio.sleep(0)
    for call in calls[::2]:
        call.cancel()
    assert await asyncio.gather(*calls[1::2]) == [2 * n for n in range(1, 20, 2)]


async def test_a_function_that_is_not_there_is_an_error_that_says_how_to_see_why(
    pool: Callable[..., WorkerPool],
) -> None:
    with pytest.raises(RunError, match=r"worker of graders:missing did not start .* tinker_atropos.grading.worker"):
        await pool("missing").call(1)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM])
async def test_no_room_for_a_process_is_said_and_the_next_call_is_answered(
    pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    doubles = pool("double", workers=1)

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", full)
        answers = asyncio.gather(*(doubles.call(n) for n in range(5)), return_exceptions=True)
        for answer in await asyncio.wait_for(answers, 60):
            assert isinstance(answer, RunError)
            assert os.strerror(code) in str(answer)
    assert await asyncio.wait_for(doubles.call(4), 60) == 8


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [ValueError, SystemExit])
async def test_calls_of_a_worker_that_breaks_are_answered_and_the_next_one_too(
    pool: Callable[..., WorkerPool], monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    doubles = pool("double", workers=1)

    def broken(*arguments: Any, **options: Any) -> None:
        raise error("planned")

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", broken)
        answers = asyncio.gather(*(doubles.call(n) for n in range(200)), return_exceptions=True)
        for answer in await asyncio.wait_for(answers, 60):
            assert isinstance(answer, RunError)
    for worker in [*doubles._workers]:
        if error is SystemExit:  # ends the thread
            await asyncio.to_thread(worker.thread.join)
    assert await asyncio.wait_for(doubles.call(4), 60) == 8
    assert len(doubles._workers) == 1
