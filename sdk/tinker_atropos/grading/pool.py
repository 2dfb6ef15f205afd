"""Calls a function on untrusted input in child processes that are ended when a call takes too long or too much memory.

A grader evaluates what a policy wrote. Some of it (a tower of powers, a pathological expression) keeps a library busy
without end inside one C call, which no exception, thread or alarm interrupts. So the function runs in workers: the
kernel ends one that uses up the processor time of a call, and the next call gets a new one. Processor time, not the
clock, so that a busy machine changes no grade; the clock is the second bound, for a call that sleeps.

Workers start with the first call and last: a call costs one line each way, and several calls travel in one message.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tinker_atropos.errors import RunError
from tinker_atropos.grading.worker import DONE, FAILED, LEAVING

START_SECONDS = 120.0  # an import on a busy machine
MAX_BATCH = 32  # calls in one message
# A message this small fits into a pipe, so that neither side can block the other by writing; larger calls go alone.
MAX_MESSAGE = 32_768

log = logging.getLogger(__name__)

Question = TypeVar("Question")
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may use: seconds of processor time, seconds of the clock, bytes of the worker's address space."""

    cpu_seconds: float = 2.0
    wall_seconds: float = 60.0
    memory_bytes: int = 2 * 1024**3


@dataclass(slots=True, eq=False)
class _Call:
    message: bytes
    future: Future[Any]
    begun: bool = False
    broke: bool = False  # a worker died of it, or beside it

    def begin(self) -> bool:
        """Return whether it is to be made; False: nobody waits for it any more."""
        self.begun = self.begun or self.future.set_running_or_notify_cancel()
        return self.begun

    def answer(self, value: Any) -> None:
        if not self.begin():
            return
        if isinstance(value, BaseException):
            self.future.set_exception(value)
        else:
            self.future.set_result(value)


class _Ended(Exception):
    """The worker is gone."""


class _TooLong(_Ended):
    """The worker said nothing in time."""


class WorkerPool(Generic[Question, Answer]):
    """`function` is `module:name`, of one JSON-ready argument and result; it is imported in the workers only.

    Calls are answered in any order. May be used from several event loops and threads, and again after `close`.
    """

    def __init__(self, function: str, *, workers: int | None = None, limits: Limits | None = None) -> None:
        self.function = function
        self.limits = limits or Limits()
        self.size = workers or available_cores()
        self.restarts = 0
        self._lock = threading.Lock()
        self._waiting: collections.deque[_Call] = collections.deque()
        self._work = threading.Condition(self._lock)
        self._workers: list[_Worker] = []

    async def call(self, question: Question) -> Answer | None:
        """Return what the function returns; None where it hit a limit or raised. `RunError` if no worker starts."""
        return await asyncio.wrap_future(self.submit(question))

    def submit(self, question: Question) -> Future[Answer | None]:
        """Return the future of a call; a cancelled one that has not begun is not made."""
        call = _Call(json.dumps(question).encode() + b"\n", Future())
        with self._work:
            self._workers = [worker for worker in self._workers if not worker.over]
            if len(self._workers) < self.size:
                worker = _Worker(self, f"{self.function}-{len(self._workers)}")
                try:
                    worker.thread.start()
                except RuntimeError as error:  # the machine has no room for a thread
                    if not self._workers:
                        raise RunError(
                            f"no worker of {self.function} starts: {error}; free memory or processes"
                        ) from error
                else:
                    self._workers.append(worker)
            self._waiting.append(call)
            self._work.notify()
        return call.future

    async def close(self) -> None:
        """End the workers; what is under way is answered with None."""
        await asyncio.get_running_loop().run_in_executor(None, self.end)

    def end(self) -> None:
        """End the workers, from any thread."""
        with self._work:
            workers, self._workers = self._workers, []
            waiting = [*self._waiting]
            self._waiting.clear()
            for worker in workers:
                worker.leaving = True
            self._work.notify_all()
        for call in waiting:
            call.answer(None)
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.thread.join()

    def _take(self, worker: _Worker) -> list[_Call]:
        """Return the next calls for a worker: its share of what waits, at most what one message holds."""
        with self._work:
            while not self._waiting and not worker.leaving:
                self._work.wait()
            if worker.leaving:
                return []
            share = min(MAX_BATCH, -(-len(self._waiting) // self.size))
            taken: list[_Call] = []
            size = 0
            while self._waiting and len(taken) < share:
                size += len(self._waiting[0].message)
                if taken and size > MAX_MESSAGE:
                    break
                call = self._waiting.popleft()
                if call.begin():
                    taken.append(call)
            return taken

    def _ended(self, worker: _Worker) -> None:
        """Count a worker out; the last one leaves no call waiting for nobody."""
        with self._work:
            worker.over = True
            if worker.leaving or not all(other.over for other in self._workers):
                return
            waiting = [*self._waiting]
            self._waiting.clear()
        for call in waiting:
            call.answer(RunError(f"the last worker of {self.function} ended; its log says why"))

    def _give_back(self, calls: collections.deque[_Call]) -> None:
        """Put calls that their worker did not reach before all others."""
        with self._work:
            self._waiting.extendleft(reversed(calls))
            self._work.notify_all()


class _Worker:
    """One thread that owns one child process, and starts it anew after it ended."""

    def __init__(self, pool: WorkerPool[Any, Any], name: str) -> None:
        self.leaving = False
        self.over = False  # its thread ended
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._pool = pool
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def kill(self) -> None:
        """End the child under way; its thread notices."""
        process = self._process
        if process is not None:
            process.kill()

    def _run(self) -> None:
        try:
            while not self.leaving:
                calls = self._pool._take(self)
                if calls:
                    self._serve(calls)
        finally:
            self._pool._ended(self)
            self._end()

    def _serve(self, calls: list[_Call]) -> None:
        """Answer calls or give them back; none is left without, whatever happens."""
        try:
            self._ask(calls)
        except BaseException as error:
            failure = RunError(f"a worker of {self._pool.function} failed: {type(error).__name__}: {error}")
            for call in calls:
                if not call.future.done():
                    call.answer(failure)
            self._end()
            if not isinstance(error, Exception):
                raise
            log.exception("%s", failure)

    def _ask(self, calls: list[_Call]) -> None:
        try:
            process = self._running()
        except RunError as error:
            for call in calls:
                call.answer(None if self.leaving else error)
            return
        left = collections.deque(calls)
        leaves = self.leaving
        try:
            assert process.stdin is not None
            process.stdin.write(b"".join(call.message for call in calls))
            process.stdin.flush()
            while left and not leaves:
                kind, value, *rest = self._line(process, self._pool.limits.wall_seconds)
                leaves = LEAVING in rest
                if kind == FAILED:
                    log.warning("%s raised %s", self._pool.function, value)
                left.popleft().answer(value if kind == DONE else None)
        except (_Ended, OSError) as error:
            leaves = True
            if not self.leaving:
                self._broken(left, process, timed_out=isinstance(error, _TooLong))
        if leaves:
            self._end()
        if left and self.leaving:  # the pool is being closed
            for call in left:
                call.answer(None)
        elif left:
            self._pool._give_back(left)

    def _broken(self, left: collections.deque[_Call], process: subprocess.Popen[bytes], *, timed_out: bool) -> None:
        """Answer the call that a child ended in.

        One that died otherwise than by a limit (by a signal from outside, perhaps between two calls) is given a second
        child to break.
        """
        if not timed_out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
        self._pool.restarts += 1
        if timed_out or process.returncode == -signal.SIGPROF or left[0].broke:
            left.popleft().answer(None)
        else:
            left[0].broke = True

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._end()
        limits = self._pool.limits
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "tinker_atropos.grading.worker", self._pool.function),
                    *(str(limits.cpu_seconds), str(limits.memory_bytes)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # A library's own threads would count against the time of a call, and their stacks against its memory.
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "OMP_NUM_THREADS": "1",
                },
            )
        except OSError as error:
            raise RunError(
                f"a worker of {self._pool.function} can't be started: {error}; close what holds files, processes or "
                "memory on this machine (`ulimit -a` shows the limits), or use fewer workers"
            ) from error
        self._process = process
        try:
            self._line(process, START_SECONDS)
        except _Ended:
            self._end()
            raise RunError(
                f"a worker of {self._pool.function} did not start (exit code {process.returncode}); run "
                f"`{sys.executable} -m tinker_atropos.grading.worker {self._pool.function} 2 {limits.memory_bytes}` "
                "to see why"
            ) from None
        return process

    def _line(self, process: subprocess.Popen[bytes], seconds: float) -> Any:
        """Return the next answer; raises `_Ended` if the child is gone or says nothing in time."""
        assert process.stdout is not None
        pipe = process.stdout.fileno()
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _TooLong
            read = os.read(pipe, 65_536)
            if not read:
                raise _Ended
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def _end(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
