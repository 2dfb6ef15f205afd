"""Awaits a run's work: gives up when the user asks, fails with its background tasks, names a silent stage."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from tinker_atropos.errors import RunError

Result = TypeVar("Result")

STALL_SECONDS = 30.0


class Stopped(RunError):
    """The user asked the run to stop, and it did."""

    exit_code = 130


class Supervisor:
    """One per attempt of a run. `say` shows one line; `where()` says how far the run is, for the notices."""

    def __init__(self, stop: asyncio.Event, say: Callable[[str], None], where: Callable[[], str]) -> None:
        self._stop, self._say, self._where = stop, say, where
        self._background: tuple[asyncio.Task[None], ...] = ()
        self._stage, self._since = "starting", time.monotonic()

    @property
    def stopping(self) -> bool:
        """Whether the user asked to stop."""
        return self._stop.is_set()

    def enter(self, stage: str) -> None:
        """Note that a stage begins; the wording goes after "still"."""
        self._stage, self._since = stage, time.monotonic()

    def depend_on(self, *background: asyncio.Task[None]) -> None:
        """Let everything that is awaited from now on fail as soon as one of these tasks fails."""
        self._background = background

    async def end_background(self) -> None:
        """Cancel the background tasks and wait for their end."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def awaiting(self, work: Coroutine[Any, Any, Result], stage: str) -> Result:
        """Await work that may be given up: raises `Stopped` when asked to stop, and what a background task raised."""
        self.enter(stage)
        task = asyncio.create_task(work)
        asked = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({task, asked, *self._background}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                for other in self._background:
                    if other.done():
                        other.result()
                        raise RunError(f"a part of the run ended while {stage}; see run.log")
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise Stopped("stopped, as asked")
            return await task
        finally:
            asked.cancel()
            task.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block name the stage of a silent run: after 30 s, then at doubling intervals.

        From a thread, so that code which holds up the event loop is named too.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(ended,), name="watching", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _watch(self, ended: threading.Event) -> None:
        due, stage = STALL_SECONDS, self._since
        while not ended.wait(min(1.0, STALL_SECONDS / 4)):
            silent = time.monotonic() - self._since
            if stage != self._since:
                due, stage = STALL_SECONDS, self._since
            if silent >= due:
                self._say(f"still {self._stage}, for {silent:.0f} s ({self._where()})")
                due *= 2
