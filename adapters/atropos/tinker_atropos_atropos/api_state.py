"""A State behind the trajectory API: what a trainer in another process leases from and commits to."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection
from types import TracebackType
from typing import Any

import aiohttp
import msgspec
from tinker_atropos.errors import RunError, TransientError
from tinker_atropos.state import FencedOut, Leased, StoredItem
from tinker_atropos.trajectory import PolicyRef

ATTEMPTS = 8


class ApiState:
    """The consumer's half of the State, over HTTP. A lost answer is asked for again; nothing is leased twice by that.

    Open it as `async with ApiState(url) as state`. Raises `FencedOut` once a newer trainer has taken over, and
    `TransientError` while the API can't be reached.
    """

    def __init__(self, url: str, *, token: str | None = None, ssl: Any = True) -> None:
        self._url = url.rstrip("/")
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._ssl = ssl
        self._session: aiohttp.ClientSession | None = None
        self._fence = 0

    async def __aenter__(self) -> ApiState:
        self._session = aiohttp.ClientSession(headers=self._headers)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fence(self) -> int:
        """Begin a trainer's epoch; all older ones are refused from now on."""
        self._fence = int(msgspec.json.decode(await self._post("fence", {}))["fence"])
        return self._fence

    async def lease(self, n: int, fence: int) -> list[Leased[StoredItem]]:
        """Take the `n` oldest groups together; waits until there are that many."""
        key = uuid.uuid4().hex
        while True:
            answer = await self._post("lease", {"n": n, "fence": fence, "key": key})
            items = msgspec.msgpack.decode(answer, type=list[tuple[str, str, dict[str, Any], bytes]])
            if items:
                return [Leased(StoredItem(id, kind, body, meta), fence) for id, kind, meta, body in items]

    async def commit(self, consumed: Collection[str], fence: int) -> None:
        """Forget leased groups that a manifest lists as consumed."""
        await self._post("commit", {"consumed": list(consumed), "fence": fence})

    async def discard(self, id: str, reason: str) -> None:
        """End a group, waiting or leased, without training on it."""
        await self._post("discard", {"ids": [id], "reason": reason, "fence": self._fence or None})

    async def rewind(self, fence: int) -> list[str]:
        """Return all leased groups to the queue; returns their ids, oldest first."""
        returned: list[str] = msgspec.json.decode(await self._post("rewind", {"fence": fence}))["returned"]
        return returned

    async def publish(self, ref: PolicyRef) -> None:
        """Let environments see how many steps are done."""
        await self._post("publish", {"step": ref.step, "fence": self._fence})

    async def _post(self, name: str, body: dict[str, Any]) -> bytes:
        if self._session is None:
            raise RuntimeError("ApiState is not open; use `async with`")
        wait = 0.1
        for attempt in range(ATTEMPTS):
            try:
                async with self._session.post(
                    f"{self._url}/tinker-atropos/{name}",
                    data=msgspec.json.encode(body),
                    ssl=self._ssl,
                    timeout=aiohttp.ClientTimeout(total=120),
                ) as answer:
                    content = await answer.read()
                    if answer.status == 200:
                        return content
                    if answer.status == 409:
                        raise FencedOut(msgspec.json.decode(content)["message"])
                    if answer.status < 500:
                        raise RunError(f"{self._url} refused {name}: {answer.status} {content.decode()[:500]}")
                    said = f"{answer.status} {content.decode()[:200]}"
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                said = f"{type(error).__name__}: {error}"
            if attempt + 1 < ATTEMPTS:
                await asyncio.sleep(wait)
                wait = min(2 * wait, 5.0)
        raise TransientError(f"{self._url} did not answer {name} in {ATTEMPTS} attempts: {said}")
