"""The trajectory API over a socket on loopback, and a client that speaks as atroposlib's do."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from tinker_atropos.state import MemoryState
from tinker_atropos_atropos.api import ApiSettings
from tinker_atropos_atropos.serving import serving
from tinker_atropos_atropos.state_backend import StateBackend


@dataclass
class Clock:
    """A clock that stands still until it is moved."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Client:
    """Calls the API; answers are (status, decoded body)."""

    url: str
    session: aiohttp.ClientSession
    backend: Any
    clock: Clock
    headers: dict[str, str] = field(default_factory=dict)

    async def call(self, method: str, path: str, body: Any = None, **settings: Any) -> tuple[int, Any]:
        if body is not None:
            settings["data"] = body if isinstance(body, bytes) else json.dumps(body)
        headers = {"Content-Type": "application/json", **self.headers, **settings.pop("headers", {})}
        async with self.session.request(method, self.url + path, headers=headers, **settings) as answer:
            text = await answer.text()
            try:
                return answer.status, json.loads(text)
            except ValueError:
                return answer.status, text

    async def get(self, path: str, body: Any = None) -> Any:
        status, answer = await self.call("GET", path, body)
        assert status == 200, answer
        return answer

    async def post(self, path: str, body: Any, **settings: Any) -> Any:
        status, answer = await self.call("POST", path, body, **settings)
        assert status == 200, answer
        return answer

    async def register(self, batch_size: int = 4, **changes: Any) -> Any:
        trainer = {
            **{"wandb_group": "group", "wandb_project": "project", "batch_size": batch_size, "max_token_len": 512},
            **{"checkpoint_dir": "/tmp/x", "save_checkpoint_interval": 10, "starting_step": 0, "num_steps": 100},
        }
        return await self.post("/register", trainer | changes)

    async def register_env(self, group_size: int = 2, **changes: Any) -> Any:
        asked = {"max_token_length": 512, "desired_name": "env", "weight": 1.0, "group_size": group_size}
        return await self.post("/register-env", asked | changes)

    async def batch(self) -> list[int] | None:
        """Return the first token of each group of the next batch."""
        found = (await self.get("/batch"))["batch"]
        return None if found is None else [group["tokens"][0][0] for group in found]


def group(first: int, size: int = 2, **fields: Any) -> dict[str, Any]:
    """A sound group whose sequences begin with `first`."""
    return {
        "tokens": [[first, 7, 8, index] for index in range(size)],
        "masks": [[-100, -100, 8, index] for index in range(size)],
        "scores": [float(index) for index in range(size)],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * size,
        **fields,
    }


@asynccontextmanager
async def connected(backend: Any, settings: ApiSettings | None = None, clock: Clock | None = None) -> Any:
    async with (
        serving(backend, settings) as url,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session,
    ):
        yield Client(url, session, backend, clock or Clock())


Opener = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def open_api() -> Opener:
    """Open the API over a State (a new one in memory if none is given); `cap`, `settings` and limits as keywords."""

    @asynccontextmanager
    async def opener(
        state: Any = None, *, cap: int = 100, settings: ApiSettings | None = None, **limits: Any
    ) -> AsyncIterator[Client]:
        clock = Clock()
        backend = StateBackend(MemoryState(cap) if state is None else state, clock=clock, wall=clock, **limits)
        async with connected(backend, settings, clock) as client:
            yield client

    return opener


@pytest.fixture
async def api(open_api: Opener) -> AsyncIterator[Client]:
    async with open_api() as client:
        yield client


@pytest.fixture
def open_backend() -> Opener:
    """Open the API over any backend."""
    return connected


@pytest.fixture
def make_group() -> Callable[..., dict[str, Any]]:
    return group


@pytest.fixture
def packed() -> Callable[[Any], bytes]:
    return lambda value: gzip.compress(json.dumps(value).encode())
