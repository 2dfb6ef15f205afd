"""The contract of a State: what stands between those who put items and the trainer that leases them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from tinker_atropos.errors import RunError
from tinker_atropos.trajectory import PolicyRef

Put: TypeAlias = Literal["accepted", "duplicate", "blocked"]


class Item(Protocol):
    """What a State keeps: a `Group`, a `Fragment`, a `StoredItem`. `id` is unique in a run and across its restarts."""

    @property
    def id(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True, slots=True)
class StoredItem:
    """Bytes that a State keeps as they are. `kind` says what they hold, `meta` what must be known without reading them.

    `meta` is small: JSON values (None, bool, int, float, str, and lists and dictionaries of them).
    """

    id: str
    kind: str
    body: bytes
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Leased(Generic[ItemT]):
    """An item that the trainer holds. It returns to the queue on a rewind, and leaves it with a commit or a discard."""

    item: ItemT
    fence: int

    @property
    def group(self) -> ItemT:
        """The item, by the name that a trainer of groups knows it by."""
        return self.item


class StateError(RunError):
    """The State cannot go on: its server refuses, or has lost what it was given."""


class FencedOut(StateError):
    """A trainer of an older epoch asked; a newer one has taken over."""


def remembered(cap: int) -> int:
    """Return how many ended ids a State of that cap remembers at least, to answer a late duplicate.

    A producer repeats a put until it knows the outcome; meanwhile the others must not push its id out of memory.
    """
    return max(10 * cap, 10_000)


class State(Protocol[ItemT]):
    """Fenced by the trainer's epoch, never by the clock alone. Every method may be called from several tasks.

    What a call that is cancelled had begun is either done or not, never half; a cancelled `lease` gives back what it
    took, and a cancelled `put` that was waiting adds nothing later. `durable`: what was put outlives this process.
    """

    durable: bool
    cap: int
    """How many items it holds at most."""

    async def fence(self) -> int:
        """Begin a trainer's epoch; all older ones are refused from now on."""
        ...

    async def put(self, item: ItemT, /, *, wait: float | None = None) -> Put:
        """Add an item; idempotent by id. At the cap it waits `wait` seconds (None: for ever), then is `blocked`."""
        ...

    async def lease(self, n: int, fence: int, *, token: str | None = None) -> list[Leased[ItemT]]:
        """Take the `n` oldest items together; waits until there are that many. Raises `FencedOut`.

        The same `token` again gives the items that it holds again, as long as nothing has ended or rewound them.
        """
        ...

    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        """End an item, waiting or leased, without training on it. With a `fence` of an older epoch: `FencedOut`."""
        ...

    async def publish(self, ref: PolicyRef) -> None:
        """Make a policy the newest."""
        ...

    def watch(self) -> AsyncIterator[PolicyRef]:
        """Yield the newest policy, then each newer one; versions published in between may be passed over."""
        ...

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget the items that a manifest lists as consumed, leased or (after a rewind) waiting again."""
        ...

    async def rewind(self, fence: int) -> list[ItemT]:
        """Return all leased items to the queue, in their old order; they were not consumed after all."""
        ...

    async def pending(self) -> list[ItemT]:
        """Return the items that neither a commit nor a discard has ended, leased ones first, oldest first."""
        ...

    async def size(self) -> int:
        """Return how many items wait; leased ones don't count."""
        ...

    async def set_note(self, name: str, note: bytes) -> None:
        """Keep a small note beside the items, as safely as they are kept; a newer one of the name replaces it."""
        ...

    async def note(self, name: str) -> bytes | None:
        """Return the note of that name, None if there is none."""
        ...

    async def close(self) -> None:
        """Let go of connections. What the State holds stays where it is; calls that wait end with `StateError`."""
        ...
