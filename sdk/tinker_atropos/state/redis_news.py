"""Wakes who waits for a change of a run in Redis: a subscription, and now and then a look, should a message be lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import NamedTuple

from redis import exceptions

from tinker_atropos.state.protocol import StateError
from tinker_atropos.state.redis_link import FIRST_PAUSE, LONGEST_PAUSE, RedisLink

LOOK_SECONDS = 5.0  # between looks while subscribed
BLIND_LOOK_SECONDS = 1.0  # and while not
SILENCE_SECONDS = 15.0  # then the subscription is asked whether it lives


class Counts(NamedTuple):
    """What Redis said last of the run: a hint of whether asking is worth it, no more."""

    waiting: int
    leased: int
    fence: int
    refs: int


class RedisNews:
    """Listens from the first `bell` on. `counts` None: not known."""

    def __init__(self, link: RedisLink, channel: str, say: Callable[[str], None]) -> None:
        self.counts: Counts | None = None
        self._link, self._channel, self._say = link, channel, say
        self._rung = asyncio.Event()
        self._listener: asyncio.Task[None] | None = None
        self._subscribed = False

    def bell(self) -> asyncio.Event:
        """Return what the next change will set. Take it before asking, so that no change in between is missed."""
        if self._listener is None:
            self._listener = asyncio.create_task(self._listen())
        return self._rung

    async def heard(
        self,
        bell: asyncio.Event,
        hopeful: Callable[[Counts], bool] = lambda counts: True,
        deadline: float | None = None,
    ) -> bool:
        """Wait until it is worth asking again; return False at the deadline (in the loop's time)."""
        loop = asyncio.get_running_loop()
        look = loop.time() + (LOOK_SECONDS if self._subscribed else BLIND_LOOK_SECONDS)
        while True:
            try:
                async with asyncio.timeout_at(look if deadline is None else min(look, deadline)):
                    await bell.wait()
            except TimeoutError:
                return deadline is None or loop.time() < deadline
            if self._link.closed:
                raise StateError(f"the state in Redis at {self._link.address} was closed while a call waited")
            bell = self._rung
            if self.counts is None or hopeful(self.counts):
                return True

    async def close(self) -> None:
        """Stop listening, and wake all."""
        self._ring(None)
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.wait([self._listener])

    def _ring(self, counts: Counts | None) -> None:
        self.counts = counts
        rung, self._rung = self._rung, asyncio.Event()
        rung.set()

    async def _listen(self) -> None:
        pause = FIRST_PAUSE
        while not self._link.closed:
            try:
                await self._follow()
            except (exceptions.RedisError, OSError) as error:
                refused = self._link.refusal(error)
                if refused is not None:
                    self._say(f"changes are looked for each {BLIND_LOOK_SECONDS:.0f} s instead of announced: {refused}")
                    return
                pause = FIRST_PAUSE if self._subscribed else min(2 * pause, LONGEST_PAUSE)
            finally:
                self._subscribed = False
            await asyncio.sleep(pause)

    async def _follow(self) -> None:
        """Pass on what is announced, until the connection is lost."""
        pubsub = self._link.client.pubsub()
        try:
            await pubsub.subscribe(self._channel)
            asked = False
            while True:
                message = await pubsub.get_message(timeout=SILENCE_SECONDS)
                if message is None:
                    if asked:
                        raise exceptions.ConnectionError("no answer to a ping")
                    await pubsub.ping()
                    asked = True
                    continue
                asked = False
                if message["type"] == "subscribe":
                    self._subscribed = True
                    self._ring(None)  # what happened before is not known
                elif message["type"] == "message":
                    self._ring(Counts(*map(int, message["data"].split())))
        finally:
            with contextlib.suppress(exceptions.RedisError, OSError):
                await pubsub.aclose()
