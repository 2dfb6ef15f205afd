"""The State of a run in Redis or Valkey: shared by processes, and there after any of them has died."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Generic, cast

from redis import exceptions
from redis.asyncio import Redis

from tinker_atropos.state import redis_scripts as scripts
from tinker_atropos.state.codec import Compression, decode, encode
from tinker_atropos.state.memory import check_lease, fenced_out
from tinker_atropos.state.protocol import ItemT, Leased, Put, StateError, remembered
from tinker_atropos.state.redis_keys import FORMAT, RunKeys
from tinker_atropos.state.redis_link import RedisLink, Unreachable
from tinker_atropos.state.redis_news import Counts, RedisNews
from tinker_atropos.trajectory import PolicyRef

log = logging.getLogger(__name__)

REPLY_BYTES = 4 << 20  # of items within one reply; larger ones are fetched one by one
THREAD_BYTES = 1 << 20  # more than this is decoded beside the event loop
CLOSE_SECONDS = 5.0
GRACE_SECONDS = 2.0  # that a put may go on after its time for an answer which is on its way


class RedisState(Generic[ItemT]):
    """Keeps at most `cap` items of a run, waiting and leased together. Opens its connections at the first call.

    While Redis is gone, calls wait and `say` is told; then they go on. Each call carries a token that Redis remembers,
    so that one whose reply was lost is repeated without doing anything twice.
    """

    durable = True

    def __init__(
        self,
        url: str,
        run: str,
        cap: int,
        *,
        say: Callable[[str], None] | None = None,
        compress: Compression | None = None,
    ) -> None:
        if cap < 1:
            raise ValueError(f"cap is {cap}; a state must hold at least one item")
        self.cap = cap
        self.keys = RunKeys(run)
        self._compress = compress
        self._say = say or log.warning
        self._link = RedisLink(url, self._say)
        self._arrivals, self._room, self._policies = (
            RedisNews(self._link, self.keys.channels + topic, self._say) for topic in ("items", "room", "policy")
        )
        self._turn = asyncio.Lock()  # of the puts that wait for room: one asks for all, the others keep their order
        self._behind = set[asyncio.Task[None]]()
        self._checked = asyncio.Lock()
        self._sound = False

    def __repr__(self) -> str:
        return f"RedisState({self._link.address!r}, run={self.keys.run!r}, cap={self.cap})"

    async def open(self) -> None:
        """Raise `StateError` unless Redis answers and can keep the run; later calls wait for it instead."""
        await self._link.check()
        await self._ready()

    async def fence(self) -> int:
        """Begin a trainer's epoch."""
        return int(await self._run(scripts.FENCE, _token()))

    async def put(self, item: ItemT, /, *, wait: float | None = None) -> Put:
        """Add an item, waiting for room; see `State.put`.

        `blocked` also says that Redis did not answer in that time; then it may have been added, and the same put again
        tells (`duplicate`).
        """
        loop = asyncio.get_running_loop()
        deadline = None if wait is None else loop.time() + wait
        token, data = _token(), encode(item, compress=self._compress)
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline + GRACE_SECONDS):
                answer = "blocked"
                if self._room.counts is None or self._has_room(self._room.counts):
                    answer = await self._put(item.id, token, data, deadline)
                if answer == "blocked":
                    answer = await self._put_in_turn(item.id, token, data, deadline)
        except (TimeoutError, Unreachable):
            return "blocked"
        return cast(Put, answer)

    async def lease(self, n: int, fence: int, *, token: str | None = None) -> list[Leased[ItemT]]:
        """Take the `n` oldest items together; see `State.lease`."""
        check_lease(n, self.cap)
        token = _token() if token is None else f"asked:{token}"
        while True:
            bell = self._arrivals.bell()
            taking = asyncio.create_task(self._take(n, fence, token))
            try:
                items = await asyncio.shield(taking)
            except asyncio.CancelledError:
                self._do_behind(self._give_back(taking, token))
                raise
            if items is not None:
                return [Leased(item, fence) for item in items]
            await self._arrivals.heard(bell, lambda counts: counts.waiting >= n or counts.fence != fence)

    async def discard(self, id: str, reason: str, *, fence: int | None = None) -> None:
        """End an item without training on it."""
        asked = "" if fence is None else fence
        self._unless_fenced(
            await self._run(scripts.DISCARD, asked, remembered(self.cap), _bytes(id), _bytes(reason)), fence or 0
        )

    async def publish(self, ref: PolicyRef) -> None:
        """Make a policy the newest."""
        await self._run(scripts.PUBLISH, json.dumps(dataclasses.asdict(ref)))

    async def watch(self) -> AsyncIterator[PolicyRef]:
        """Yield the newest policy, then each newer one."""
        seen: bytes | None = None
        while True:
            bell = self._policies.bell()
            newest = await self._ask(lambda client: client.hget(self.keys.meta, "ref"))
            if newest is not None and newest != seen:
                seen = newest
                yield PolicyRef(**json.loads(newest))
                continue
            await self._policies.heard(bell)

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget the items that a manifest lists as consumed."""
        self._unless_fenced(await self._run(scripts.COMMIT, fence, remembered(self.cap), *map(_bytes, consumed)), fence)

    async def rewind(self, fence: int) -> list[ItemT]:
        """Return all leased items to the queue, in their old order."""
        ids = self._unless_fenced(await self._run(scripts.REWIND, fence, _token()), fence)
        return await self._items(ids)

    async def pending(self) -> list[ItemT]:
        """Return the items that neither a commit nor a discard has ended."""

        async def both(client: Redis) -> list[list[bytes]]:
            async with client.pipeline(transaction=True) as pipe:
                return list(await pipe.zrange(self.keys.leased, 0, -1).zrange(self.keys.waiting, 0, -1).execute())

        leased, waiting = await self._ask(both)
        return await self._items([*leased, *waiting])

    async def size(self) -> int:
        """Return how many items wait."""
        return int((await self._run(scripts.COUNTS))[0])

    async def set_note(self, name: str, note: bytes) -> None:
        """Keep a note beside the items."""
        await self._ask(lambda client: client.hset(self.keys.meta, f"note:{name}", note))

    async def note(self, name: str) -> bytes | None:
        """Return the note of that name."""
        return cast(bytes | None, await self._ask(lambda client: client.hget(self.keys.meta, f"note:{name}")))

    async def forget(self) -> None:
        """Remove everything that Redis keeps of the run."""
        await self._ask(lambda client: client.unlink(*self.keys.all))
        self._sound = False

    async def close(self) -> None:
        """Close the connections; what Redis keeps stays there, and calls that wait end with `StateError`."""
        if self._behind and not self._link.closed:
            await asyncio.wait(self._behind, timeout=CLOSE_SECONDS)
        await self._link.close()
        for news in (self._arrivals, self._room, self._policies):
            await news.close()
        for task in list(self._behind):
            task.cancel()

    # Puts ------------------------------------------------------------------------------------------------------------

    def _has_room(self, counts: Counts) -> bool:
        return counts.waiting + counts.leased < self.cap

    async def _put(self, id: str, token: str, data: bytes, deadline: float | None) -> str:
        answer = await self._run(scripts.PUT, self.cap, _bytes(id), token, data, deadline=deadline)
        return str(answer.decode())

    async def _put_in_turn(self, id: str, token: str, data: bytes, deadline: float | None) -> str:
        """Put as soon as there is room; `blocked` or TimeoutError at the deadline."""
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout_at(deadline):
                await stack.enter_async_context(self._turn)
            while True:
                bell = self._room.bell()
                answer = await self._put(id, token, b"", deadline)
                if answer == "room":
                    answer = await self._put(id, token, data, deadline)
                if answer != "blocked" or not await self._room.heard(bell, self._has_room, deadline):
                    return answer

    # Leases ----------------------------------------------------------------------------------------------------------

    async def _take(self, n: int, fence: int, token: str) -> list[ItemT] | None:
        """Lease and fetch the items; None if there are too few."""
        for _ in range(5):
            answer = await self._run(scripts.LEASE, n, fence, token, REPLY_BYTES)
            if answer[0] == b"wait":
                self._arrivals.counts = Counts(*answer[1:])
                return None
            answer = self._unless_fenced(answer, fence)
            ids, bodies = answer[::2], answer[1::2]
            found: list[Any] = [
                await self._body(id) if body == 0 else body for id, body in zip(ids, bodies, strict=True)
            ]
            if None not in found:
                return await self._decoded(ids, found)
            missing = ids[found.index(None)]  # discarded just now: the same token takes another in its place
        raise self._lost(f"item {missing.decode(errors='replace')!r} is gone from it")

    async def _give_back(self, taking: asyncio.Task[list[ItemT] | None], token: str) -> None:
        await asyncio.wait([taking])
        if taking.cancelled() or taking.exception() is not None or taking.result() is not None:
            with contextlib.suppress(StateError):
                await self._run(scripts.GIVE_BACK, token)

    def _do_behind(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _body(self, id: bytes) -> bytes | None:
        return cast(bytes | None, await self._ask(lambda client: client.hget(self.keys.items, id)))

    async def _items(self, ids: Sequence[bytes]) -> list[ItemT]:
        """Return those of the items that have not ended meanwhile."""
        found = [(id, body) for id in ids if (body := await self._body(id)) is not None]
        return await self._decoded([id for id, _ in found], [body for _, body in found])

    async def _decoded(self, ids: Sequence[bytes], bodies: Sequence[bytes]) -> list[ItemT]:
        if sum(map(len, bodies)) > THREAD_BYTES:
            return await asyncio.to_thread(_decode_all, ids, bodies)
        return _decode_all(ids, bodies)

    # Asking ----------------------------------------------------------------------------------------------------------

    async def _run(self, script: str, *arguments: Any, deadline: float | None = None) -> Any:
        text, digest = _whole(script)
        keys = [*self.keys.all, self.keys.channels, *arguments]

        async def attempt(client: Redis) -> Any:
            count = len(self.keys.all)
            try:
                return await client.evalsha(digest, count, *keys)
            except exceptions.NoScriptError:  # new to it, or it has restarted
                return await client.eval(text, count, *keys)

        return await self._ask(attempt, deadline)

    async def _ask(self, attempt: Callable[[Redis], Any], deadline: float | None = None) -> Any:
        if not self._sound:
            await self._ready(deadline)
        return await self._link.ask(attempt, deadline)

    async def _ready(self, deadline: float | None = None) -> None:
        """Make sure once that the keys of the run are of this version."""
        async with self._checked:
            if self._sound:
                return
            await self._link.ask(lambda client: client.hsetnx(self.keys.meta, "format", FORMAT), deadline)
            found = await self._link.ask(lambda client: client.hget(self.keys.meta, "format"), deadline)
            if found != FORMAT.encode():
                raise StateError(
                    f"run {self.keys.run!r} in Redis at {self._link.address} is kept in format {found!r}, this "
                    f"tinker-atropos reads {FORMAT}; use one version in all services, or another run name"
                )
            self._sound = True

    def _unless_fenced(self, answer: Sequence[Any], fence: int) -> list[Any]:
        """Return a script's answer without its first word; raise `FencedOut` if that says so."""
        if answer[0] != b"fenced":
            return list(answer[1:])
        if answer[1] < fence:
            raise self._lost(f"it knows epoch {answer[1]}, this trainer is of epoch {fence}")
        raise fenced_out(fence, answer[1])

    def _lost(self, sign: str) -> StateError:
        return StateError(
            f"Redis at {self._link.address} has lost the state of run {self.keys.run!r} ({sign}): it restarted without "
            "`appendonly yes`, or was emptied; resume the run from its newest manifest"
        )


def _token() -> str:
    return secrets.token_hex(16)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")  # an id may be what a model wrote


@functools.cache
def _whole(script: str) -> tuple[str, str]:
    """Return a script with its head, and what Redis knows it by."""
    text = scripts.HEAD + script
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _decode_all(ids: Sequence[bytes], bodies: Sequence[bytes]) -> list[Any]:
    items = []
    for id, body in zip(ids, bodies, strict=True):
        try:
            items.append(decode(body))
        except StateError as error:
            name = id.decode(errors="replace")
            raise StateError(f"item {name!r} can't be read: {error}; `discard` it to go on without it") from error
    return items
