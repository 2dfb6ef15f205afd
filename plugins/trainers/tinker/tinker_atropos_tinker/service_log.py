"""Shows what the SDK keeps to itself: queue pauses, retries, its warnings, and waits that last."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

T = TypeVar("T")

HEARTBEAT = 30.0
"""Seconds until a wait is named, and between two lines of one kind."""

LOOK = 1.0
"""Seconds between two looks at whether waiting still makes sense."""

LOGGER = logging.getLogger("tinker_atropos_tinker")

_NOISE = ("because of try_again",)  # the SDK warns of every long poll that came back empty


class Reporter:
    """Takes single lines from any thread and shows them on the run's loop, each kind at most every `quiet` seconds."""

    def __init__(self, say: Callable[[str], None], quiet: float = HEARTBEAT) -> None:
        self._say = say
        self._quiet = quiet
        self._loop = asyncio.get_running_loop()
        self._last: dict[str, float] = {}
        self._paused: dict[str, str] = {}

    def line(self, kind: str, text: str) -> None:
        """Show `text`, unless a line of this kind was shown just now."""
        now = time.monotonic()
        if now - self._last.get(kind, -self._quiet) < self._quiet:
            return
        self._last[kind] = now
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._say, text)

    async def told(self, awaitable: Awaitable[T], stage: str, look: Callable[[], None] | None = None) -> T:
        """Await something; name the stage every 30 s while it lasts.

        A stage reads `what of which`; lines of one `what` are of one kind. `look` is called every second; what it
        raises ends the wait. That, or a cancellation, cancels what is awaited.
        """
        task = asyncio.ensure_future(awaitable)
        began = time.monotonic()
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=LOOK)
                if done:
                    return task.result()
                if look is not None:
                    look()
                waited = time.monotonic() - began
                if waited >= self._quiet:
                    why = "".join(f"; {pause}" for pause in self._paused.values())
                    self.line(f"wait {stage.split(' of ')[0]}", f"waiting for {stage}, {waited:.0f} s so far{why}")
        except BaseException:
            task.cancel()
            raise

    def queue_state(self, what: str, state: str, reason: str | None) -> None:
        """Take a change of a queue's state (`active`, `paused_capacity`, `paused_rate_limit`)."""
        if state == "active":
            if self._paused.pop(what, None) is not None:
                self.line(f"active {what}", f"{what} goes on")
            return
        self._paused[what] = f"{what} is paused by the service ({reason or state.replace('_', ' ')})"
        self.line(f"paused {what}", self._paused[what])


class _Forward(logging.Handler):
    """Hands warnings of a logger on as single lines."""

    def __init__(self, reporter: Reporter) -> None:
        super().__init__(logging.WARNING)
        self._reporter = reporter

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(noise in text for noise in _NOISE):
            return
        self._reporter.line(f"{record.name}:{record.lineno}", f"tinker: {text.splitlines()[0]}")


@contextmanager
def _forwarded(reporter: Reporter) -> Iterator[None]:
    handler = _Forward(reporter)
    loggers = (logging.getLogger("tinker"), LOGGER)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def forward_warnings(reporter: Reporter) -> AbstractContextManager[None]:
    """Show the SDK's warnings and this package's through the reporter, as long as the context lasts."""
    return _forwarded(reporter)


def watch_queue(client: Any, reporter: Reporter, what: str) -> None:
    """Have a training or sampling client's queue pauses reported at once.

    The SDK itself tells of a pause in training after 15 minutes. It takes an observer only in this private place, so
    where that is gone its own warnings and the heartbeat remain.
    """

    class Observer:
        def on_queue_state_change(self, queue_state: Any, queue_state_reason: str | None) -> None:
            reporter.queue_state(what, str(getattr(queue_state, "value", queue_state)), queue_state_reason)

    if hasattr(client, "_queue_state_logger"):
        client._queue_state_logger = Observer()
    elif hasattr(client, "on_queue_state_change"):
        client.on_queue_state_change = Observer().on_queue_state_change


def watch_retries(client: Any, reporter: Reporter) -> None:
    """Have a client's retries reported.

    The SDK retries for minutes without a log line; all it does is tell its telemetry. With telemetry off there is none,
    and this puts a listener in its place, which sends nothing anywhere.
    """
    holder = getattr(client, "holder", None)
    if holder is not None and getattr(holder, "_telemetry", ...) is None:
        holder._telemetry = _RetryListener(reporter)


class _RetryListener:
    """Stands where the SDK's telemetry would, and reports what is retried."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def log(self, event_name: str, event_data: dict[str, Any] | None = None, severity: str = "INFO") -> bool:
        data = event_data or {}
        if data.get("status_code") == 408 and event_name.startswith("APIFuture."):
            return True  # a long poll that came back empty: the result is not there yet, nothing failed
        if data.get("is_retryable") or data.get("should_retry"):
            what = str(data.get("request_type") or str(data.get("func", "request")).rsplit(".", 1)[-1].strip("_"))
            status = data.get("status_code")
            cause = f"HTTP {status}" if status else str(data.get("exception_type", "connection error"))
            waited = float(data.get("elapsed_time") or 0.0)
            self._reporter.line(
                f"retry {what}", f"tinker: {what} failed ({cause}), trying again, {waited:.0f} s so far"
            )
        return True

    @contextmanager
    def capture_exceptions(self, fatal: bool = False, severity: str = "ERROR") -> Iterator[None]:
        yield

    def acapture_exceptions(self, fatal: bool = False, severity: str = "ERROR") -> AbstractAsyncContextManager[None]:
        @asynccontextmanager
        async def nothing() -> AsyncIterator[None]:
            yield

        return nothing()

    async def log_exception(self, exception: BaseException, severity: str = "ERROR") -> bool:
        return True

    log_fatal_exception = log_exception

    def log_exception_sync(self, exception: BaseException, severity: str = "ERROR") -> bool:
        return True

    log_fatal_exception_sync = log_exception_sync

    def stop(self) -> None:
        """Nothing to stop."""

    async def close(self) -> None:
        """Nothing to send."""
