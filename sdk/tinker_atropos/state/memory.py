"""The State of a run in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection
from typing import Generic

from tinker_atropos.state.protocol import FencedOut, ItemT, Leased, Put, StateError, remembered
from tinker_atropos.trajectory import PolicyRef


class MemoryState(Generic[ItemT]):
    """Keeps at most `cap` items, waiting and leased together; oldest first by arrival."""

    durable = False

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"cap is {cap}; a state must hold at least one item")
        self.cap = cap
        self._changed = asyncio.Condition()
        self._waiting: dict[str, ItemT] = {}
        self._leased: dict[str, ItemT] = {}
        self._tokens: dict[str, str] = {}  # of leased items, where their lease has one
        self._ended: dict[str, str] = {}
        self._notes: dict[str, bytes] = {}
        self._fence = 0
        self._ref: PolicyRef | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    async def fence(self) -> int:
        """Begin a trainer's epoch."""
        async with self._changed:
            self._fence += 1
            self._changed.notify_all()
            return self._fence

    async def put(self, item: ItemT, /, *, wait: float | None = None) -> Put:
        """Add an item, waiting for room; see `State.put`."""
        async with self._changed:
            try:
                async with asyncio.timeout(wait):
                    await self._until(lambda: self._known(item.id) or len(self._waiting) + len(self._leased) < self.cap)
            except TimeoutError:
                return "blocked"
            if self._known(item.id):
                return "duplicate"
            self._waiting[item.id] = item
            self._changed.notify_all()
            return "accepted"

    async def lease(self, n: int, fence: int, *, token: str | None = None) -> list[Leased[ItemT]]:
        """Take the `n` oldest items together; see `State.lease`."""
        check_lease(n, self.cap)
        async with self._changed:
            await self._until(lambda: len(self._waiting) + len(self._held_by(token)) >= n or fence != self._fence)
            self._check(fence)
            held = self._held_by(token)
            taken = [self._waiting.pop(id) for id in list(self._waiting)[: max(0, n - len(held))]]
            self._leased.update({item.id: item for item in taken})
            if token is not None:
                self._tokens.update({item.id: token for item in taken})
            return [Leased(item, fence) for item in (*held, *taken)]

    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        """End an item without training on it."""
        async with self._changed:
            if fence is not None:
                self._check(fence)
            self._end([id], reason)

    async def publish(self, ref: PolicyRef) -> None:
        """Make a policy the newest."""
        async with self._changed:
            self._ref = ref
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[PolicyRef]:
        """Yield the newest policy, then each newer one."""
        seen: PolicyRef | None = None
        while True:
            async with self._changed:
                while self._ref is None or self._ref == seen:
                    self._check_open()
                    await self._changed.wait()
                seen = self._ref
            yield seen

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget the items that a manifest lists as consumed."""
        async with self._changed:
            self._check(fence)
            self._end(consumed, "trained")

    async def rewind(self, fence: int) -> list[ItemT]:
        """Return all leased items to the queue, in their old order."""
        async with self._changed:
            self._check(fence)
            returned = list(self._leased.values())
            self._waiting = {**self._leased, **self._waiting}
            self._leased.clear()
            self._tokens.clear()
            self._changed.notify_all()
            return returned

    async def pending(self) -> list[ItemT]:
        """Return the items that neither a commit nor a discard has ended."""
        return [*self._leased.values(), *self._waiting.values()]

    async def size(self) -> int:
        """Return how many items wait."""
        return len(self)

    async def set_note(self, name: str, note: bytes) -> None:
        """Keep a note beside the items."""
        self._notes[name] = note

    async def note(self, name: str) -> bytes | None:
        """Return the note of that name."""
        return self._notes.get(name)

    async def close(self) -> None:
        """End the calls that wait."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def _until(self, true: Callable[[], bool]) -> None:
        while not true():
            self._check_open()
            await self._changed.wait()

    def _end(self, ids: Collection[str], reason: str) -> None:
        for id in ids:
            self._waiting.pop(id, None)
            self._leased.pop(id, None)
            self._tokens.pop(id, None)
            self._ended[id] = reason
        # Ended ids are kept only to answer a late duplicate.
        for id in list(self._ended)[: max(0, len(self._ended) - remembered(self.cap))]:
            del self._ended[id]
        self._changed.notify_all()

    def _held_by(self, token: str | None) -> list[ItemT]:
        return [] if token is None else [self._leased[id] for id, held in self._tokens.items() if held == token]

    def _known(self, id: str) -> bool:
        return id in self._waiting or id in self._leased or id in self._ended

    def _check(self, fence: int) -> None:
        if fence != self._fence:
            raise fenced_out(fence, self._fence)

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the state was closed while a call waited")


def check_lease(n: int, cap: int) -> None:
    """Raise ValueError if a lease of `n` items can never be had."""
    if n > cap:
        raise ValueError(f"a lease of {n} items can never be had: the state holds {cap} at most")
    if n < 0:
        raise ValueError(f"a lease of {n} items makes no sense; ask for 1 or more")


def fenced_out(fence: int, current: int) -> FencedOut:
    """Return the error of a trainer whose epoch is over."""
    return FencedOut(f"the trainer's epoch {fence} is over: epoch {current} has taken its place")
