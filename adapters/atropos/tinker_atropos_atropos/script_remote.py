"""Groups of a trajectory API that runs elsewhere: the classic three terminals. Starts no script."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping

from tinker_atropos.errors import TransientError
from tinker_atropos.external import GroupSink, PolicyEndpoint

from tinker_atropos_atropos.script_api import OpenRemote, RemoteState, open_remote
from tinker_atropos_atropos.script_config import TOKEN_VARIABLE, AtroposConfig
from tinker_atropos_atropos.script_watch import Limits, Watch

STATUS_SECONDS = 1.0
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
        """Let the state prove what is posted; say what is silent. Raises `RunError` where nothing comes for long."""
        await self.state.join(endpoint)
        sink.say(
            f"groups come from {self.url}; environments sample from {endpoint.url} and load the tokenizer "
            f"{endpoint.tokenizer}"
        )
        limits = Limits(self.config.startup_timeout, self.config.idle_timeout, self.config.log_lines)
        watch, answers = Watch([ALL], limits, None, self._clock()), True
        while True:
            try:
                seen, waiting = await self.state.observe()
            except TransientError as error:
                if answers:
                    sink.say(f"the trajectory API at {self.url} does not answer ({error}); asking again")
                answers = False
            else:
                answers = True
                enough = waiting >= sink.info.batch_size or sink.step >= sink.info.total_steps
                for line in watch.look(self._clock(), {ALL: seen}, enough=enough):
                    sink.say(line)
            await asyncio.sleep(STATUS_SECONDS)

    async def close(self) -> None:
        """Let go of the API; what was leased and is in no checkpoint comes again."""
        await self.state.close()
