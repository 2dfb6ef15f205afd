"""The State as the API needs it: of stored items instead of groups, and with notes of who takes part."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tinker_atropos.errors import ConfigError
from tinker_atropos.state import MemoryState, Put

from tinker_atropos_atropos.stored import StoredItem


@dataclass(frozen=True, slots=True)
class LeasedItem:
    """An item that a trainer holds."""

    item: StoredItem
    fence: int


class Items(Protocol):
    """State of stored items; see `tinker_atropos.state.State` for what each method promises."""

    cap: int

    async def fence(self) -> int: ...
    async def put(self, item: StoredItem, *, wait: float | None = None) -> Put: ...
    async def lease(self, n: int, fence: int) -> list[LeasedItem]: ...
    async def discard(self, id: str, reason: str) -> None: ...
    async def commit(self, consumed: Collection[str], fence: int) -> None: ...
    async def rewind(self, fence: int) -> list[StoredItem]: ...

    async def waiting(self) -> list[StoredItem]:
        """Return what waits and is not leased, oldest first; bodies may be left empty."""
        ...

    async def load_notes(self) -> bytes | None:
        """Return what `save_notes` kept, if anything outlives the process."""
        ...

    async def save_notes(self, notes: bytes) -> None:
        """Keep who takes part and how far the run is, as safely as the items."""
        ...

    async def close(self) -> None: ...


class MemoryItems:
    """Items in this process: a restart of the API finds none of them again."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self._state = MemoryState(cap)
        self._notes: bytes | None = None

    async def fence(self) -> int:
        return await self._state.fence()

    async def put(self, item: StoredItem, *, wait: float | None = None) -> Put:
        # MemoryState asks of a group nothing but its id.
        return await self._state.put(cast(Any, item), wait=wait)

    async def lease(self, n: int, fence: int) -> list[LeasedItem]:
        return [LeasedItem(cast(Any, leased.group), fence) for leased in await self._state.lease(n, fence)]

    async def discard(self, id: str, reason: str) -> None:
        await self._state.discard(id, reason)

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        await self._state.commit(consumed, fence)

    async def rewind(self, fence: int) -> list[StoredItem]:
        return [cast(Any, group) for group in await self._state.rewind(fence)]

    async def waiting(self) -> list[StoredItem]:
        count = len(self._state)
        return [cast(Any, group) for group in (await self._state.pending())[-count:]] if count else []

    async def load_notes(self) -> bytes | None:
        return self._notes

    async def save_notes(self, notes: bytes) -> None:
        self._notes = notes

    async def close(self) -> None:
        pass


async def open_items(url: str, run: str, cap: int) -> Items:
    """Return the items that `--state` names; raises `ConfigError` where it names none."""
    if cap < 1:
        raise ConfigError(f"--cap {cap}: the API must hold at least one group")
    if url == "memory":
        return MemoryItems(cap)
    raise ConfigError(f"--state {url!r:.80}: there is no such state; use memory")
