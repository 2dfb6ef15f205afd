"""Groups of a trajectory API that runs elsewhere: the classic three terminals. Starts no script."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from tinker_atropos.errors import RunError, TransientError
from tinker_atropos.external import GroupSink, PolicyEndpoint

from tinker_atropos_atropos.script_api import OpenRemote, RemoteState, open_remote
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_watch import Limits, Seen, Watch

Result = TypeVar("Result")

TOKEN_VARIABLE = "TINKER_ATROPOS_API_TOKEN"
"""Holds the API's bearer token, where it asks for one; a secret does not belong into a configuration file."""

STATUS_SECONDS = 1.0
GONE_SECONDS = 300.0
"""Seconds for which an API that does not answer is asked again."""

CLASSIC_PORT = 8001
"""Where the original served inference, and where scripts therefore ask."""

ALL = "the environment"


class RemoteEnvironment:
    """An API elsewhere is the run's state: groups are leased there, and end there with the run's checkpoints."""

    def __init__(
        self,
        config: AtroposConfig,
        open_remote: OpenRemote = open_remote,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.api_url is not None
        self.config, self.url, self._clock = config, config.api_url, clock
        self.state: RemoteState = open_remote(config, os.environ.get(TOKEN_VARIABLE))
        self.endpoint: Mapping[str, object] = {
            "port": CLASSIC_PORT if config.endpoint_port is None else config.endpoint_port
        }

    async def run(self, endpoint: PolicyEndpoint, sink: GroupSink) -> None:
        """Register as the trainer, then tell the API how far the run is; say what is silent.

        Raises `RunError` where the API is gone for long, or nothing comes for long.
        """
        await self._patiently(lambda: self.state.join(endpoint, sink.info), sink)
        sink.say(f"groups come from {self.url}; environments sample from {endpoint.url}")
        limits = Limits(self.config.startup_timeout, self.config.idle_timeout, self.config.log_lines)
        watch = Watch([ALL], limits, None, self._clock())
        while True:
            seen = await self._patiently(lambda: self.state.tell(sink.step), sink)
            enough = sink.waiting >= sink.info.batch_size or sink.step >= sink.info.total_steps
            for line in watch.look(self._clock(), {ALL: _together(seen)}, enough=enough):
                sink.say(line)
            await asyncio.sleep(STATUS_SECONDS)

    async def close(self) -> None:
        """Let go of the API; what was leased and is in no checkpoint comes again."""
        await self.state.close()

    async def _patiently(self, call: Callable[[], Awaitable[Result]], sink: GroupSink) -> Result:
        """Call until the API answers; raises `RunError` when it has been gone for long."""
        began, pause, said = self._clock(), 0.2, False
        while True:
            try:
                return await call()
            except TransientError as error:
                gone = self._clock() - began
                if gone >= GONE_SECONDS:
                    raise RunError(
                        f"the trajectory API at {self.url} has not answered for {gone:.0f} s: {error}. Start it with "
                        "`tinker-atropos run-api`, then continue this run with --resume"
                    ) from error
                if not said:
                    sink.say(f"the trajectory API at {self.url} does not answer ({error}); asking again")
                    said = True
            await asyncio.sleep(pause)
            pause = min(pause * 2, 5.0)


def _together(seen: Mapping[str, Seen]) -> Seen:
    """All environments of an API as one: there any number of them comes and goes."""
    reasons = [facts.last_refusal for facts in seen.values() if facts.last_refusal]
    return Seen(
        registered=any(facts.registered for facts in seen.values()),
        posted=sum(facts.posted for facts in seen.values()),
        refused=sum(facts.refused for facts in seen.values()),
        last_refusal=reasons[-1] if reasons else None,
    )
