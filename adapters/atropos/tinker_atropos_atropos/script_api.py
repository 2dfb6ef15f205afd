"""What running scripts needs of a trajectory API: one that is served here, or the State behind one elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from tinker_atropos.external import GroupSink, PolicyEndpoint, RunInfo

from tinker_atropos_atropos.script_config import AtroposConfig
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


class RemoteState(Protocol):
    """The State behind a trajectory API elsewhere; beside this it is a `tinker_atropos.state.State` of groups.

    Its calls are patient with an API that does not answer, but for `observe`.
    """

    def begin(self, info: RunInfo) -> None:
        """Take the sizes that the API is told; called before the first epoch."""
        ...

    async def join(self, endpoint: PolicyEndpoint) -> None:
        """From now on posted groups are proven by `endpoint`."""
        ...

    async def observe(self) -> tuple[Seen, int]:
        """Return what was seen of the environments together, and how many trajectories wait there.

        Raises `TransientError` where the API does not answer.
        """
        ...

    async def close(self) -> None:
        """Let go of the connection, and of the leases."""
        ...


class OpenRemote(Protocol):
    """Makes the State behind the API at `config.api_url`; connects to nothing yet."""

    def __call__(self, config: AtroposConfig, token: str | None) -> RemoteState:
        """Return it. `token` goes along as a bearer token; environments are told `config.wandb_project` and group."""
        ...


def serve_here(endpoint: PolicyEndpoint, sink: GroupSink, *, host: str, port: int) -> AbstractAsyncContextManager[Api]:
    """Serve the trajectory API of this distribution in this process."""
    from tinker_atropos_atropos.script_serving import serve_for_scripts

    return serve_for_scripts(endpoint, sink, host=host, port=port)


def open_remote(config: AtroposConfig, token: str | None) -> RemoteState:
    """Return the State behind the trajectory API at `config.api_url`, whose protocol is that of this distribution."""
    from tinker_atropos_atropos.script_state import RemoteGroups

    return RemoteGroups(config, token)
