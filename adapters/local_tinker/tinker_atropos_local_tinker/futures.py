"""Results that wait to be fetched: bounded in number and time, delivered as often as the SDK asks.

Everything here belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos_local_tinker.answers import Gone, failure

JSON, PROTO = "application/json", "application/x-protobuf"
DELIVERED_SECONDS = 120.0  # a reply may be lost on its way, so the SDK may ask once more
ABANDONED_SECONDS = 3600.0
DELIVERED_BYTES = 256 << 20
LONG_POLL_SECONDS = 30.0  # the SDK's own time-out is 45

Target = tuple[str, int]
"""A sampling session and the number of the client that uses it."""


@dataclass(slots=True)
class Answer:
    """A future's final reply."""

    body: bytes
    content_type: str = JSON
    failed: bool = False


def json_answer(fields: Any) -> Answer:
    """Return a JSON reply."""
    return Answer(json.dumps(fields).encode())


def failed_answer(error: BaseException) -> Answer:
    """Return the reply of a request that failed."""
    return Answer(json.dumps(failure(error)).encode(), failed=True)


@dataclass(slots=True)
class _Entry:
    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer | None = None
    target: Target | None = None
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Completions:
    cursor: int = 0
    log: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class FutureTable:
    """Every request that was accepted, by its id."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._delivered: OrderedDict[str, float] = OrderedDict()
        self._delivered_bytes = 0
        self._completions: dict[Target, _Completions] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def open(self, request_id: str, target: Target | None = None) -> None:
        """Accept a request."""
        self._entries[request_id] = _Entry(target=target)

    def resolve(self, request_id: str, answer: Answer) -> None:
        """Give the final reply; a second one, or one nobody waits for any more, is dropped."""
        entry = self._entries.get(request_id)
        if entry is None or entry.answer is not None:
            return
        entry.answer = answer
        entry.since = time.monotonic()
        entry.done.set()
        if entry.target is not None:
            completions = self._completions.setdefault(entry.target, _Completions())
            completions.cursor += 1
            item: dict[str, Any] = {"state": "failed" if answer.failed else "finished", "request_id": request_id}
            if not answer.failed:
                item["response_payload_uncompressed_size"] = len(answer.body)
            completions.log.append((completions.cursor, item))
            completions.changed.set()

    async def wait(self, request_id: str, seconds: float = LONG_POLL_SECONDS) -> Answer | None:
        """Return the reply, or None where there is none yet; raises `Gone` for an id that isn't kept (any more)."""
        entry = self._entries.get(request_id)
        if entry is None:
            raise Gone(f"request {request_id!r} is not kept here: it was fetched long ago, or the server was restarted")
        try:
            async with asyncio.timeout(seconds):
                await entry.done.wait()
        except TimeoutError:
            return None
        if entry.answer is not None and request_id not in self._delivered:
            self._delivered[request_id] = time.monotonic()
            self._delivered_bytes += len(entry.answer.body)
        self.expire()
        return entry.answer

    async def wait_any(self, target: Target, cursor: int, seconds: float) -> tuple[list[dict[str, Any]], int]:
        """Return what completed for `target` after `cursor`, and the new cursor."""
        completions = self._completions.setdefault(target, _Completions())
        while completions.log and completions.log[0][0] <= cursor:
            completions.log.popleft()
        if not completions.log and seconds > 0:
            completions.changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await completions.changed.wait()
            except TimeoutError:
                return [], cursor
        items = [item for _, item in completions.log]
        return items, completions.log[-1][0] if completions.log else cursor

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop results that were fetched whole."""
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            if entry is not None and entry.answer is not None:
                self._drop(request_id)

    def forget_session(self, sampling_session_id: str) -> None:
        """Drop the completion logs of a sampling session that has ended."""
        for target in [t for t in self._completions if t[0] == sampling_session_id]:
            del self._completions[target]

    def expire(self) -> None:
        """Drop what was delivered a while ago, or is too much."""
        now = time.monotonic()
        while self._delivered:
            request_id, at = next(iter(self._delivered.items()))
            if now - at < DELIVERED_SECONDS and self._delivered_bytes <= DELIVERED_BYTES:
                break
            self._drop(request_id)

    def expire_abandoned(self) -> None:
        """Drop what nobody came for in a long time; looks at every entry, so it is for now and then."""
        old = time.monotonic() - ABANDONED_SECONDS
        for request_id in [r for r, e in self._entries.items() if e.answer is not None and e.since < old]:
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        entry = self._entries.pop(request_id, None)
        if self._delivered.pop(request_id, None) is not None and entry is not None and entry.answer is not None:
            self._delivered_bytes -= len(entry.answer.body)
