"""What stands between rollout and trainer: groups waiting, leased and consumed, fenced by the trainer's epoch."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tinker_atropos.errors import RunError
from tinker_atropos.state.memory import MemoryState
from tinker_atropos.trajectory import Group, PolicyRef

__all__ = ["FencedOut", "Leased", "MemoryState", "Put", "State"]

Put: TypeAlias = Literal["accepted", "duplicate", "blocked"]


@dataclass(frozen=True, slots=True)
class Leased:
    """A group that the trainer holds. It returns to the queue on a rewind, and leaves it with a commit or a discard."""

    group: Group
    fence: int


class FencedOut(RunError):
    """A trainer of an older epoch asked; a newer one has taken over."""


class State(Protocol):
    """Fenced by the trainer's epoch, never by the clock alone. Every method may be called from several tasks.

    `durable`: what was put outlives this process.
    """

    durable: bool

    async def fence(self) -> int:
        """Begin a trainer's epoch; all older ones are refused from now on."""
        ...

    async def put(self, group: Group, *, wait: float | None = None) -> Put:
        """Add a group; idempotent by id. At the cap it waits `wait` seconds (None: for ever), then is `blocked`."""
        ...

    async def lease(self, n: int, fence: int) -> list[Leased]:
        """Take the `n` oldest groups together; waits until there are that many. Raises `FencedOut`."""
        ...

    async def discard(self, id: str, reason: str) -> None:
        """End a group, waiting or leased, without training on it."""
        ...

    async def publish(self, ref: PolicyRef) -> None:
        """Make a policy the newest."""
        ...

    def watch(self) -> AsyncIterator[PolicyRef]:
        """Yield the newest policy, then each newer one; versions published in between may be passed over."""
        ...

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget leased groups that a manifest lists as consumed."""
        ...

    async def rewind(self, fence: int) -> list[Group]:
        """Return all leased groups to the queue, in their old order; they were not consumed after all."""
        ...

    async def pending(self) -> list[Group]:
        """Return the groups that neither a commit nor a discard has ended, leased or not, oldest first."""
        ...

    async def close(self) -> None:
        """Free what it holds in this process."""
        ...
