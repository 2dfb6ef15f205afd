"""The consumer's half of the State over HTTP, for a trainer in another process that commits with its checkpoint."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from aiohttp import web

from tinker_atropos_atropos.backend import Backend, Conflict
from tinker_atropos_atropos.posted import read_small
from tinker_atropos_atropos.state_backend import StateBackend

MSGPACK = "application/msgpack"
LONGEST_WAIT = 60.0

Number = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Lease(msgspec.Struct, frozen=True):
    """Asks for the `n` oldest groups within `wait` seconds; `key` is the request's own name, for asking again."""

    n: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    fence: Number
    key: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    wait: Annotated[float, msgspec.Meta(ge=0.0, le=LONGEST_WAIT)] = 30.0


class Commit(msgspec.Struct, frozen=True):
    """Lists groups that a checkpoint holds as consumed."""

    consumed: list[str]
    fence: Number


class Discard(msgspec.Struct, frozen=True):
    """Lists groups that end untrained. With a `fence` an older trainer is refused."""

    ids: list[str]
    reason: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    fence: Number | None = None


class Rewind(msgspec.Struct, frozen=True):
    """Asks for all leased groups to go back to the line."""

    fence: Number


class Publish(msgspec.Struct, frozen=True):
    """Tells how many optimiser steps are done."""

    step: Number
    fence: Number


def add_trainer_routes(app: web.Application, backend: Backend) -> None:
    """Serve `/tinker-atropos/…`; without a State behind the API every one of them is a conflict."""

    def state() -> StateBackend:
        if not isinstance(backend, StateBackend):
            raise Conflict("the run behind this API takes the groups itself; there is nothing to lease")
        return backend

    async def fence(request: web.Request) -> web.Response:
        return _json({"fence": await state().fence()})

    async def lease(request: web.Request) -> web.Response:
        asked = read_small(await request.read(), Lease)
        leased = await state().lease(asked.n, asked.fence, asked.wait, asked.key)
        items = [[entry.item.id, entry.item.kind, dict(entry.item.meta), entry.item.body] for entry in leased]
        return web.Response(body=msgspec.msgpack.encode(items), content_type=MSGPACK)

    async def commit(request: web.Request) -> web.Response:
        asked = read_small(await request.read(), Commit)
        await state().commit(asked.consumed, asked.fence)
        return _json({})

    async def discard(request: web.Request) -> web.Response:
        asked = read_small(await request.read(), Discard)
        await state().discard(asked.ids, asked.reason, asked.fence)
        return _json({})

    async def rewind(request: web.Request) -> web.Response:
        returned = await state().rewind(read_small(await request.read(), Rewind).fence)
        return _json({"returned": [item.id for item in returned]})

    async def publish(request: web.Request) -> web.Response:
        asked = read_small(await request.read(), Publish)
        await state().publish(asked.step, asked.fence)
        return _json({})

    async def details(request: web.Request) -> web.Response:
        return _json(backend.details())  # type: ignore[attr-defined]

    routes: dict[str, Callable[[web.Request], Awaitable[web.Response]]] = {
        "fence": fence,
        "lease": lease,
        "commit": commit,
        "discard": discard,
        "rewind": rewind,
        "publish": publish,
    }
    app.add_routes([web.post(f"/tinker-atropos/{name}", handler) for name, handler in routes.items()])
    app.add_routes([web.get("/tinker-atropos/status", details, allow_head=False)])


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
