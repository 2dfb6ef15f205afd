"""Takes groups from a trajectory API that runs elsewhere: the classic three terminals. Starts no script."""

from __future__ import annotations

import asyncio
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeVar

from tinker_atropos.errors import RunError, TransientError
from tinker_atropos.external import GroupSink, PolicyEndpoint

from tinker_atropos_atropos.script_api import Client, Convert, Posted, Unusable, connect, convert_posted
from tinker_atropos_atropos.script_config import AtroposConfig
from tinker_atropos_atropos.script_sink import EQUAL, CountingSink
from tinker_atropos_atropos.script_watch import Limits, Seen, Watch

Result = TypeVar("Result")

TOKEN_VARIABLE = "TINKER_ATROPOS_API_TOKEN"
"""Holds the API's bearer token, where it asks for one; a secret does not belong into a configuration file."""

POLL_SECONDS = 0.2
STATUS_SECONDS = 1.0
GONE_SECONDS = 300.0
"""Seconds for which an API that does not answer is asked again."""

ALL = "the environment"

_live: weakref.WeakSet[RemoteEnvironment] = weakref.WeakSet()


def tell_checkpoint(consumed: Collection[str]) -> None:
    """Tell every environment of this process which groups a checkpoint holds."""
    for environment in list(_live):
        environment.consumed(consumed)


class RemoteEnvironment:
    """Groups of an API elsewhere: leased, converted, put; committed there once a checkpoint of this run holds them."""

    def __init__(
        self,
        config: AtroposConfig,
        connect: Callable[[str, str | None], Client] = connect,
        convert: Convert = convert_posted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.api_url is not None
        self.config, self.url = config, config.api_url
        self._connect, self._convert, self._clock = connect, convert, clock
        self._client: Client | None = None
        self._held: set[str] = set()
        self._final: list[str] = []
        _live.add(self)

    async def run(self, endpoint: PolicyEndpoint, sink: GroupSink) -> None:
        """Move groups until cancelled. Raises `RunError` where the API is gone for long, or nothing comes for long."""
        counting = CountingSink(sink, self._clock)
        if self._client is None:
            self._client = self._connect(self.url, os.environ.get(TOKEN_VARIABLE))
        client = self._client
        await self._patiently(lambda: client.open(sink.info), counting)
        sink.say(f"groups come from {self.url}; environments sample from {endpoint.url}")
        moving = asyncio.create_task(self._move(client, endpoint, counting))
        telling = asyncio.create_task(self._tell(client, counting))
        try:
            await asyncio.wait({moving, telling}, return_when=asyncio.FIRST_COMPLETED)
            for task in (moving, telling):
                if task.done():
                    task.result()
        finally:
            for task in (moving, telling):
                task.cancel()
            await asyncio.gather(moving, telling, return_exceptions=True)

    def consumed(self, ids: Collection[str]) -> None:
        """Note that a checkpoint holds what these groups gave; those of others are passed over."""
        mine = [group for group in ids if group in self._held]
        self._held.difference_update(mine)
        self._final.extend(mine)

    async def close(self) -> None:
        """Commit what the last checkpoint holds, then let go of the API."""
        _live.discard(self)
        client, self._client = self._client, None
        if client is None:
            return
        try:
            if self._final:
                await client.commit(self._final)
                self._final = []
        finally:
            await client.close()

    async def _move(self, client: Client, endpoint: PolicyEndpoint, sink: CountingSink) -> None:
        groups = max(1, sink.info.batch_size // sink.info.group_size)
        most = sink.info.batch_size * (sink.info.max_staleness + 1)
        while True:
            await self._commit(client, sink)
            leased: Sequence[Posted] = ()
            if sink.waiting < most:  # what is not leased stays safe where it is
                leased = await self._patiently(lambda: client.lease(groups), sink)
            for posted in leased:
                await self._take(posted, client, endpoint, sink)
            if not leased:
                await asyncio.sleep(POLL_SECONDS)

    async def _take(self, posted: Posted, client: Client, endpoint: PolicyEndpoint, sink: CountingSink) -> None:
        try:
            group = self._convert(posted, endpoint)
        except Unusable as error:
            reason = str(error)
            sink.say(f"a posted group was discarded: {reason}")
            await self._patiently(lambda: client.discard(posted.id, reason), sink)
            return
        self._held.add(posted.id)
        discarded = sink.discarded
        await sink.put(group)
        if sink.discarded > discarded:
            self._held.discard(posted.id)
            await self._patiently(lambda: client.discard(posted.id, EQUAL), sink)

    async def _commit(self, client: Client, sink: CountingSink) -> None:
        ids = list(self._final)
        if ids:
            await self._patiently(lambda: client.commit(ids), sink)
            self._final = self._final[len(ids) :]

    async def _tell(self, client: Client, sink: CountingSink) -> None:
        """Tell the API how far the run is; say what is silent."""
        limits = Limits(self.config.startup_timeout, self.config.idle_timeout, self.config.log_lines)
        watch = Watch([ALL], limits, None, self._clock())
        while True:
            seen = await self._patiently(lambda: client.status(sink.step), sink)
            enough = sink.waiting >= sink.info.batch_size or sink.step >= sink.info.total_steps
            lines = watch.look(self._clock(), {ALL: _together(seen)}, enough=enough)
            for line in (*lines, *watch.equal(sink.equal_in_a_row)):
                sink.say(line)
            await asyncio.sleep(STATUS_SECONDS)

    async def _patiently(self, call: Callable[[], Awaitable[Result]], sink: CountingSink) -> Result:
        """Call until the API answers; raises `RunError` when it has been gone for long."""
        began, pause = self._clock(), POLL_SECONDS
        said = False
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
