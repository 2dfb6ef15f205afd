"""The State of a run in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import TYPE_CHECKING

from tinker_atropos.trajectory import Group, PolicyRef

if TYPE_CHECKING:
    from tinker_atropos.state import Leased, Put


class MemoryState:
    """Keeps at most `cap` groups, waiting and leased together; oldest first by arrival."""

    durable = False

    def __init__(self, cap: int) -> None:
        if cap < 1:
            raise ValueError(f"cap is {cap}; a state must hold at least one group")
        self.cap = cap
        self._changed = asyncio.Condition()
        self._waiting: dict[str, Group] = {}
        self._leased: dict[str, Group] = {}
        self._ended: dict[str, str] = {}
        self._fence = 0
        self._ref: PolicyRef | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def fence(self) -> int:
        """Begin a trainer's epoch."""
        async with self._changed:
            self._fence += 1
            self._changed.notify_all()
            return self._fence

    async def put(self, group: Group, *, wait: float | None = None) -> Put:
        """Add a group, waiting for room; see `State.put`."""
        async with self._changed:
            if self._known(group.id):
                return "duplicate"
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait_for(lambda: len(self._waiting) + len(self._leased) < self.cap)
            except TimeoutError:
                return "blocked"
            if self._known(group.id):
                return "duplicate"
            self._waiting[group.id] = group
            self._changed.notify_all()
            return "accepted"

    async def lease(self, n: int, fence: int) -> list[Leased]:
        """Take the `n` oldest groups together; see `State.lease`."""
        from tinker_atropos.state import Leased

        if n > self.cap:
            raise ValueError(f"a lease of {n} groups can never be had: the state holds {self.cap} at most")
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._waiting) >= n or fence != self._fence)
            self._check(fence)
            taken = [self._waiting.pop(id) for id in list(self._waiting)[:n]]
            self._leased.update({group.id: group for group in taken})
            return [Leased(group, fence) for group in taken]

    async def discard(self, id: str, reason: str) -> None:
        """End a group without training on it."""
        async with self._changed:
            self._waiting.pop(id, None)
            self._leased.pop(id, None)
            self._ended[id] = reason
            self._changed.notify_all()

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
                    await self._changed.wait()
                seen = self._ref
            yield seen

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget leased groups that a manifest lists as consumed."""
        async with self._changed:
            self._check(fence)
            for id in consumed:
                self._leased.pop(id, None)
            # Ended ids are kept only to answer a late duplicate; a producer never looks back further than this.
            for id in list(self._ended)[: -10 * self.cap]:
                del self._ended[id]
            self._ended.update(dict.fromkeys(consumed, "trained"))
            self._changed.notify_all()

    async def rewind(self, fence: int) -> list[Group]:
        """Return all leased groups to the queue, in their old order."""
        async with self._changed:
            self._check(fence)
            returned = list(self._leased.values())
            self._waiting = {**self._leased, **self._waiting}
            self._leased.clear()
            self._changed.notify_all()
            return returned

    async def pending(self) -> list[Group]:
        """Return the groups that neither a commit nor a discard has ended."""
        return [*self._leased.values(), *self._waiting.values()]

    async def close(self) -> None:
        """Nothing is held beyond the objects themselves."""

    def _known(self, id: str) -> bool:
        return id in self._waiting or id in self._leased or id in self._ended

    def _check(self, fence: int) -> None:
        from tinker_atropos.state import FencedOut

        if fence != self._fence:
            raise FencedOut(f"the trainer's epoch {fence} is over: epoch {self._fence} has taken its place")
