"""What running scripts needs of a trajectory API: one served here, or a client of one that is served elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos.errors import DataError
from tinker_atropos.external import GroupSink, PolicyEndpoint, RunInfo
from tinker_atropos.trajectory import Group

from tinker_atropos_atropos.script_watch import Seen


class Api(Protocol):
    """A trajectory API that serves: its address, and what it saw of each environment by the name that it asked for."""

    url: str

    def seen(self) -> Mapping[str, Seen]:
        """Return what was seen so far, by `desired_name`."""
        ...


class StartApi(Protocol):
    """Serves the trajectory API until its block ends. Groups go to `sink`, proven by `endpoint`."""

    def __call__(
        self, endpoint: PolicyEndpoint, sink: GroupSink, *, host: str, port: int
    ) -> AbstractAsyncContextManager[Api]:
        """Listen, on a free port for `port` 0."""
        ...


@dataclass(frozen=True, slots=True)
class Posted:
    """One group as an environment posted it, leased from an API elsewhere."""

    id: str
    content: Mapping[str, Any]


class Client(Protocol):
    """A trainer's side of a trajectory API elsewhere. What is leased and not committed is leased again after a restart.

    Its calls raise `TransientError` where the API does not answer for the moment.
    """

    async def open(self, info: RunInfo) -> None:
        """Register as the trainer; what an earlier one leased and did not commit comes again."""
        ...

    async def lease(self, groups: int) -> Sequence[Posted]:
        """Return up to so many groups, first in first out; none where none wait."""
        ...

    async def commit(self, ids: Sequence[str]) -> None:
        """Let these be gone for good: a checkpoint holds what they gave."""
        ...

    async def discard(self, group: str, reason: str) -> None:
        """Let one be gone for good that can't be trained on."""
        ...

    async def status(self, step: int) -> Mapping[str, Seen]:
        """Tell the optimiser steps done; return what was seen of each environment."""
        ...

    async def close(self) -> None:
        """Let go of the connection, and of the leases."""
        ...


class Unusable(DataError):
    """A posted group that can't be trained on; the message is the reason that is recorded."""


class Convert(Protocol):
    """Makes a group of what was posted. Raises `Unusable`."""

    def __call__(self, posted: Posted, endpoint: PolicyEndpoint) -> Group:
        """Return the group, its id that of the posted one."""
        ...


def serve_here(endpoint: PolicyEndpoint, sink: GroupSink, *, host: str, port: int) -> AbstractAsyncContextManager[Api]:
    """Serve the trajectory API of this distribution in this process."""
    raise NotImplementedError("the trajectory API is not joined to scripts yet")


def connect(url: str, token: str | None) -> Client:
    """Return a client of the trajectory API at `url`."""
    raise NotImplementedError("the trajectory API is not joined to its remote clients yet")


def convert_posted(posted: Posted, endpoint: PolicyEndpoint) -> Group:
    """Return the group that was posted, every trained token proven."""
    raise NotImplementedError("the trajectory API is not joined to its remote clients yet")
