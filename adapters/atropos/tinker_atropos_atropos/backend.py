"""What stands behind the trajectory API: a queue of its own, or the sink of a run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos.state import StoredItem

from tinker_atropos_atropos.posted import Arrived
from tinker_atropos_atropos.roster import RegisterEnv, Registration


class Full(Exception):
    """There is no room, and waiting for it took too long; the poster may come again."""


class Conflict(Exception):
    """The request makes sense, but not to this API now."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A checked group on its way in. `compressed` is the gzip it came as, `key` what its poster calls it.

    `content` is what it goes by without a key: its digest, or that of the list it came in with its place there.
    """

    group: Arrived
    compressed: bytes | None = None
    key: str | None = None
    content: str = ""


@dataclass(slots=True, eq=False)
class Delivery:
    """A batch on its way out; `given` once the client has taken it whole."""

    items: list[StoredItem]
    given: bool = False


class Backend(Protocol):
    """Everything the endpoints ask. Answers are what goes out as JSON."""

    async def start(self) -> None:
        """Begin, or continue where an earlier process ended."""
        ...

    async def close(self) -> None:
        """Let go of what is held."""
        ...

    async def register(self, registration: Registration) -> dict[str, Any]: ...
    async def register_env(self, asked: RegisterEnv) -> dict[str, Any]: ...
    async def disconnect_env(self, number: int) -> dict[str, Any]: ...
    def wandb_info(self) -> dict[str, Any]: ...
    def info(self) -> dict[str, Any]: ...
    def status(self) -> dict[str, Any]: ...

    def status_env(self, number: int) -> dict[str, Any]:
        """Answer an environment's poll; raises `Refused` for a number that was not given."""
        ...

    def room(self, wait: float) -> AbstractAsyncContextManager[None]:
        """Hold a place for one post, from before its body is read until it is put; `Full` after `wait` seconds."""
        ...

    def prepare(self, arrival: Arrival) -> Any:
        """Return what `put` takes of a checked group, and nothing that is not needed while it waits; in a thread."""
        ...

    async def put(self, prepared: Sequence[Any], wait: float) -> list[dict[str, Any]]:
        """Take groups, one answer each, once they are safe. Raises `Refused`, `Full`."""
        ...

    def batch(self) -> AbstractAsyncContextManager[Delivery | dict[str, Any]]:
        """Hold the next batch, or the answer that says why there is none; what is not marked `given` comes again."""
        ...

    def latest(self) -> bytes | None:
        """Return the JSON of the group that arrived last."""
        ...

    async def reset(self) -> None:
        """Forget everything; raises `Conflict` where that is not the API's to do."""
        ...
