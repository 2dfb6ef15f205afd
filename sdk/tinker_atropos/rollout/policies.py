"""Keeps a policy open while somebody in flight needs it, and the newest one always."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tinker_atropos.trainer import TextPolicy
from tinker_atropos.trajectory import PolicyRef

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Open:
    policy: TextPolicy
    users: int = 0


class PolicyPool:
    """Opens each published policy once; hands out the newest; releases an older one when its last user is done."""

    def __init__(
        self,
        open_policy: Callable[[PolicyRef], Awaitable[TextPolicy]],
        release: Callable[[PolicyRef], Awaitable[None]],
    ) -> None:
        self._open_policy, self._release = open_policy, release
        self._open: dict[PolicyRef, _Open] = {}
        self._newest: PolicyRef | None = None
        self._changed = asyncio.Condition()

    @property
    def newest(self) -> PolicyRef | None:
        """The newest policy, None before the first."""
        return self._newest

    async def adopt(self, ref: PolicyRef) -> None:
        """Open a policy and make it the newest."""
        if ref == self._newest:
            return
        policy = await self._open_policy(ref)
        async with self._changed:
            self._open[ref] = _Open(policy)
            self._newest = ref
            self._changed.notify_all()
        await self._sweep()

    @asynccontextmanager
    async def use(self, step: int = 0) -> AsyncIterator[TextPolicy]:
        """Hold the newest policy, once it is of `step` or later; it stays open until the block ends."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._newest is not None and self._newest.step >= step)
            assert self._newest is not None
            entry = self._open[self._newest]
            entry.users += 1
        try:
            yield entry.policy
        finally:
            entry.users -= 1
            await self._sweep()

    async def _sweep(self) -> None:
        for ref in [ref for ref, entry in self._open.items() if not entry.users and ref != self._newest]:
            del self._open[ref]
            try:
                await self._release(ref)
            except Exception as error:  # a policy that can't be freed costs memory, not the run
                log.warning("policy of step %d could not be released: %s", ref.step, error)
