"""The connection to Redis: goes on trying while the server is gone, says so, and makes its refusals errors of ours."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from redis import exceptions
from redis.asyncio import ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from tinker_atropos.errors import ConfigError
from tinker_atropos.state.protocol import StateError

ReplyT = TypeVar("ReplyT")

CONNECTIONS = 32  # at once, besides one for each kind of news
CONNECT_SECONDS = 5.0
REPLY_SECONDS = 30.0  # then the connection counts as lost, and the call is repeated on another
SAY_AFTER, SAY_EVERY = 3.0, 30.0  # seconds without an answer
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between attempts
OPEN_SECONDS = 12.0
OLDEST = (6, 2)
TEMPORARY = re.compile(
    r"\b(READONLY|MISCONF|LOADING|BUSY|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS)\b|max number of clients"
)


class Unreachable(StateError):
    """The server did not answer before the deadline."""


class RedisLink:
    """Commands to one Redis. Every `ask` may be sent several times, so what it sends must bear repeating."""

    def __init__(self, url: str, say: Callable[[str], None]) -> None:
        self.address = shown(url)
        self._secret = _password(url)
        self._say = say
        self._since: float | None = None  # when the oldest call began that got no answer, while there is none
        self._said = 0.0
        self._cause = "no answer"
        self.closed = False
        self._places = asyncio.Semaphore(CONNECTIONS)
        try:
            self.pool = ConnectionPool.from_url(
                url,
                socket_connect_timeout=CONNECT_SECONDS,
                socket_timeout=REPLY_SECONDS,
                retry=Retry(NoBackoff(), 0),
                protocol=2,
            )
        except (ValueError, TypeError):  # its text may hold a part of the password
            raise ConfigError(
                f"{self.address} is no address of a Redis; use redis://[user:password@]host:port/0, rediss:// for TLS "
                "or unix:///path, with special characters of the password percent-encoded"
            ) from None
        self.pool.connection_kwargs["decode_responses"] = False
        self.client = Redis(connection_pool=self.pool)

    async def ask(self, attempt: Callable[[Redis], Awaitable[ReplyT]], deadline: float | None = None) -> ReplyT:
        """Return what `attempt` returns; while Redis is gone, try again, until the deadline (in the loop's time).

        Raises `Unreachable` after the deadline, `StateError` when Redis refuses.
        """
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        asked_to_end = 0 if task is None else task.cancelling()
        talk = list[asyncio.TimerHandle]()
        talk.append(loop.call_later(SAY_AFTER, self._complain, loop.time(), talk))
        pause = FIRST_PAUSE
        try:
            while True:
                if self.closed:
                    raise StateError(f"the state in Redis at {self.address} was closed while a call was under way")
                try:
                    async with self._places:
                        reply = await attempt(self.client)
                except (exceptions.RedisError, OSError) as error:
                    self._bear(error)
                else:
                    self._answered()
                    # The client sends by asyncio.wait_for, which in Python 3.11 forgets a cancellation at its end.
                    if task is not None and task.cancelling() > asked_to_end:
                        raise asyncio.CancelledError
                    return reply
                if deadline is not None and loop.time() + pause >= deadline:
                    raise Unreachable(f"Redis at {self.address} does not answer: {self._cause}")
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            talk[-1].cancel()

    async def check(self) -> None:
        """Raise `StateError` unless this is a Redis that can keep a run: there, new enough, and never evicting."""
        deadline = asyncio.get_running_loop().time() + OPEN_SECONDS
        try:
            async with asyncio.timeout_at(deadline):
                await self.ask(lambda client: client.ping(), deadline)
                facts = await self.ask(_facts, deadline)
        except (TimeoutError, Unreachable):
            raise Unreachable(
                f"Redis at {self.address} does not answer: {self._cause}; start it, or correct the address "
                "(`memory` needs no Redis)"
            ) from None
        version = str(facts.get("redis_version", ""))
        numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
        if len(numbers) == 2 and numbers < OLDEST:
            raise StateError(f"Redis at {self.address} is version {version}; 6.2 or newer (or Valkey) is needed")
        policy = str(facts.get("maxmemory_policy", "noeviction"))
        if policy.startswith("allkeys"):
            raise StateError(
                f"Redis at {self.address} may evict what a run put there (maxmemory-policy {policy}); "
                "set `maxmemory-policy noeviction`"
            )
        if facts.get("aof_enabled") == 0:
            self._say(
                f"Redis at {self.address} keeps no append-only file: what waits in it is lost when it restarts; "
                "set `appendonly yes`"
            )

    async def close(self) -> None:
        """Close every connection; calls under way end with `StateError`."""
        self.closed = True
        with contextlib.suppress(exceptions.RedisError, OSError):
            await self.pool.disconnect(inuse_connections=True)

    def refusal(self, error: BaseException) -> StateError | None:
        """Return the error of ours for what Redis said, None where trying again may help."""
        text = str(error).replace(self._secret, "…") if self._secret else str(error)
        where = f"Redis at {self.address}"
        if isinstance(error, exceptions.AuthenticationError | exceptions.AuthorizationError) or "NOAUTH" in text:
            return StateError(f"{where} refuses the user or password ({text}); correct the URL")
        if isinstance(error, exceptions.NoPermissionError) or re.search(r"NOPERM|ACL failure|can't run this", text):
            return StateError(
                f"{where} refuses its user a command ({text}); give it `~tinker-atropos:* resetchannels "
                "&tinker-atropos:* +@all -@dangerous +info`"
            )
        if "OOM" in text:
            return StateError(
                f"{where} is out of memory; raise its maxmemory, or lower rollout and batch sizes so that less waits"
            )
        if "WRONGTYPE" in text:
            return StateError(f"{where} holds other data under the keys of this run; use another run name or database")
        if isinstance(error, exceptions.MovedError | exceptions.AskError) or "cross slot" in text.lower():
            return StateError(f"{where} is one node of a cluster, and not the one of this run ({text}); name that one")
        self._cause = text or type(error).__name__
        if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError) or TEMPORARY.search(text):
            return None
        return StateError(f"{where} answered with an error: {text}")

    def _bear(self, error: Exception) -> None:
        refused = self.refusal(error)
        if refused is not None:
            raise refused from None  # the client's own errors quote what was sent

    def _answered(self) -> None:
        if self._since is not None and self._said:
            self._say(f"Redis at {self.address} answers again, after {time.monotonic() - self._since:.0f} s")
        self._since, self._said, self._cause = None, 0.0, "no answer"

    def _complain(self, began: float, talk: list[asyncio.TimerHandle]) -> None:
        """Say that a call has been waiting; again while it lasts."""
        loop, now = asyncio.get_running_loop(), time.monotonic()
        if self._since is None:
            self._since = now - (loop.time() - began)
        if not self._said or now - self._said >= SAY_EVERY:
            self._said = now
            self._say(
                f"Redis at {self.address} does not answer ({self._cause}); waiting for it, "
                f"{now - self._since:.0f} s so far"
            )
        talk.append(loop.call_later(SAY_EVERY, self._complain, began, talk))


async def _facts(client: Redis) -> dict[str, Any]:
    """Return what Redis says of itself, nothing where its user may not ask."""
    try:
        return {**await client.info("server"), **await client.info("memory"), **await client.info("persistence")}
    except exceptions.NoPermissionError:
        return {}


def shown(url: str) -> str:
    """Return the URL without user, password and options, for people to read."""
    scheme, found, rest = url.partition("://")
    if not found:
        return "the address given"
    return f"{scheme}://{rest.split('?')[0].rsplit('@', 1)[-1]}"


def _password(url: str) -> str:
    try:
        parts = urlsplit(url)
        return unquote(parts.password or "") or parse_qs(parts.query).get("password", [""])[0]
    except ValueError:
        return ""
