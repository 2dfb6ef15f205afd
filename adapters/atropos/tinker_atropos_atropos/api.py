"""The trajectory API over HTTP: atroposlib's endpoints, their bodies and status codes. What is done lies behind it."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import functools
import hashlib
import hmac
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from aiohttp import web
from isal import isal_zlib
from tinker_atropos.state import FencedOut, StateError, StoredItem

from tinker_atropos_atropos.backend import Arrival, Backend, Conflict, Delivery, Full
from tinker_atropos_atropos.bodies import GZIP, LEVEL, WORTH_GZIP, BadBody, TooLarge, gunzip, gzipped
from tinker_atropos_atropos.posted import Refused, normal_form, path_text, read_group, read_groups, read_small
from tinker_atropos_atropos.roster import EnvIdentifier, RegisterEnv, Registration
from tinker_atropos_atropos.stored import json_of

log = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
SMALL_BODY = 64 * 1024
"""Bytes of a document that is no group; also up to where a group is decoded on the event loop."""
BODY_SECONDS = 60.0
READING = 64
"""Bodies of groups that are read at one time."""
CHUNK = 256 * 1024
RETRY_AFTER = 5

NO_EXAMPLE: dict[str, Any] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs"),
        *("generation_params", "inference_logprobs", "messages", "images"),
    )
}


@dataclass(frozen=True, slots=True)
class ApiSettings:
    """Limits and rights. `hold`: seconds that a post waits for room before it is told to come again.

    `max_body` bounds what is sent, `max_plain` what it holds once decompressed, in bytes. Without a `token` only
    loopback names are answered.
    """

    token: str | None = None
    max_body: int = 32 * 1024**2
    max_plain: int = 128 * 1024**2
    hold: float = 240.0


def make_app(backend: Backend, settings: ApiSettings | None = None) -> web.Application:
    """Return the application that serves `backend`, starts it and closes it at its end."""
    settings = settings or ApiSettings()
    app = web.Application(client_max_size=settings.max_body, middlewares=[_errors, _guard(settings)])
    routes = _Routes(backend, settings)
    get: dict[str, Handler] = {
        "/": _message,
        "/wandb_info": routes.wandb_info,
        "/info": routes.info,
        "/batch": routes.batch,
        "/latest_example": routes.latest_example,
        "/status": routes.status,
        "/status-env": routes.status_env,
        "/reset_data": routes.reset_data,
    }
    post: dict[str, Handler] = {
        "/register": routes.register,
        "/register-env": routes.register_env,
        "/disconnect-env": routes.disconnect_env,
        "/scored_data": routes.scored_data,
        "/scored_data_list": routes.scored_data_list,
    }
    # No HEAD: it would take a batch.
    app.add_routes([web.get(path, handler, allow_head=False) for path, handler in get.items()])
    app.add_routes([web.post(path, handler) for path, handler in post.items()])

    from tinker_atropos_atropos.trainer_api import add_trainer_routes

    add_trainer_routes(app, backend)

    async def live(app: web.Application) -> AsyncIterator[None]:
        await backend.start()
        yield
        routes.close()
        await backend.close()

    app.cleanup_ctx.append(live)
    return app


class _Routes:
    def __init__(self, backend: Backend, settings: ApiSettings) -> None:
        self._backend = backend
        self._settings = settings
        self._reading = asyncio.Semaphore(READING)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="atropos-api")

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def register(self, request: web.Request) -> web.Response:
        return _json(await self._backend.register(await self._document(request, Registration)))

    async def register_env(self, request: web.Request) -> web.Response:
        return _json(await self._backend.register_env(await self._document(request, RegisterEnv)))

    async def disconnect_env(self, request: web.Request) -> web.Response:
        return _json(await self._backend.disconnect_env((await self._document(request, EnvIdentifier)).env_id))

    async def wandb_info(self, request: web.Request) -> web.Response:
        return _json(self._backend.wandb_info())

    async def info(self, request: web.Request) -> web.Response:
        return _json(self._backend.info())

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._backend.status())

    async def status_env(self, request: web.Request) -> web.Response:
        # atroposlib sends the number as the body of a GET.
        return _json(self._backend.status_env((await self._document(request, EnvIdentifier)).env_id))

    async def reset_data(self, request: web.Request) -> web.Response:
        await self._backend.reset()
        return web.Response(text="Reset successful")

    async def latest_example(self, request: web.Request) -> web.Response:
        latest = self._backend.latest()
        if latest is None:
            return _json(NO_EXAMPLE)
        packed = _takes_gzip(request) and len(latest) >= WORTH_GZIP
        body = await self._in_thread(gzipped, latest) if packed else latest
        return web.Response(body=body, headers=_headers(packed))

    async def scored_data(self, request: web.Request) -> web.Response:
        (answer,) = await self._post(request, many=False)
        return _json(answer)

    async def scored_data_list(self, request: web.Request) -> web.Response:
        answers = await self._post(request, many=True)
        buffered = [answer["buffer_size"] for answer in answers if answer["status"] == "buffered"]
        said: dict[str, Any] = {"status": "received", "groups_processed": len(answers)}
        if buffered:
            said |= {"buffered": len(buffered), "last_buffer_size": buffered[-1]}
        return _json(said)

    async def _post(self, request: web.Request, *, many: bool) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.hold
        key = request.headers.get("Idempotency-Key")
        if key is not None and not 0 < len(key) <= 200:
            raise Refused(("Idempotency-Key",), "a key has 1 to 200 characters")
        # Before the body is read: a poster who must wait costs nothing but a connection.
        async with self._backend.room(self._settings.hold):
            async with self._reading:
                body, packed = await self._body(request)
                prepare = functools.partial(self._prepare, body, packed, many, key)
                prepared = await self._in_thread(prepare) if packed or len(body) > SMALL_BODY else prepare()
                del body, prepare
            return await self._backend.put(prepared, max(0.0, deadline - loop.time()))

    def _prepare(self, body: bytes, packed: bool, many: bool, key: str | None) -> list[Any]:
        plain = gunzip(body, self._settings.max_plain) if packed else body
        if not many:
            group = read_group(plain)
            return [self._backend.prepare(Arrival(group, body if packed else None, key, group.digest))]
        # Equal groups of one list are several groups; the list posted again is the same ones.
        content = hashlib.sha256(plain).hexdigest()[:32]
        return [
            self._backend.prepare(Arrival(group, None, key and f"{key}#{index}", f"{content}#{index}"))
            for index, group in enumerate(read_groups(plain))
        ]

    async def _body(self, request: web.Request) -> tuple[bytes, bool]:
        encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
        if encoding not in {"identity", "gzip", "x-gzip", ""}:
            raise web.HTTPUnsupportedMediaType(reason=f"Content-Encoding {encoding[:40]!r} is not known; use gzip")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason=f"no whole body came within {BODY_SECONDS:.0f} s") from None
        return body, "gzip" in encoding and bool(body)

    async def _document(self, request: web.Request, kind: type[T]) -> T:
        body, packed = await self._body(request)
        if packed:
            body = gunzip(body, SMALL_BODY)
        if len(body) > SMALL_BODY:
            raise TooLarge(f"this document has {len(body)} bytes; {SMALL_BODY} are enough for it")
        return read_small(body, kind)

    async def batch(self, request: web.Request) -> web.StreamResponse:
        async with self._backend.batch() as found:
            if not isinstance(found, Delivery):
                return _json(found)
            packed = _takes_gzip(request)
            body = await self._in_thread(_render, found.items, packed)
            response = web.StreamResponse(headers=_headers(packed))
            response.content_length = len(body)
            if request.transport is None:
                raise ConnectionResetError("the client has gone")
            await response.prepare(request)
            view = memoryview(body)
            for start in range(0, len(view), CHUNK):
                await response.write(view[start : start + CHUNK])
            await response.write_eof()
            found.given = await _sent(request)
            return response

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _render(items: list[StoredItem], packed: bool) -> bytes:
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP) if packed else None
    parts: list[bytes] = []

    def add(part: bytes) -> None:
        parts.append(part if packer is None else packer.compress(part))

    add(b'{"batch":[')
    for index, item in enumerate(items):
        if index:
            add(b",")
        add(normal_form(json_of(item)))
    add(b"]}")
    if packer is not None:
        parts.append(packer.flush())
    return b"".join(parts)


async def _sent(request: web.Request) -> bool:
    """Return whether the client was there until the last byte had left; a batch that was not taken comes again."""
    waited = 0.0
    while (transport := request.transport) is not None and not transport.is_closing():
        if not transport.get_write_buffer_size():
            return True
        if waited > BODY_SECONDS:
            return False
        await asyncio.sleep(0.005)
        waited += 0.005
    return False


def _json(value: Any, status: int = 200, **headers: str) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json", headers=headers or None
    )


async def _message(request: web.Request) -> web.Response:
    return _json({"message": "AtroposLib API"})


def _takes_gzip(request: web.Request) -> bool:
    return "gzip" in request.headers.get("Accept-Encoding", "").lower()


def _headers(packed: bool) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Vary": "Accept-Encoding"}
    return headers | {"Content-Encoding": "gzip"} if packed else headers


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Refused as error:
        log.info("%s %s refused: %s", request.method, request.path, error)
        detail = {
            "loc": ["body", *error.place],
            "msg": f"{path_text(error.place)}: {error.message}",
            "type": error.kind,
        }
        return _json({"detail": [detail]}, 422)
    except BadBody as error:
        return _json({"detail": f"Invalid gzip payload: {error}"}, 400)
    except (TooLarge, web.HTTPRequestEntityTooLarge) as error:
        text = error.reason if isinstance(error, web.HTTPException) else str(error)
        return _json({"detail": text}, 413)
    except Full as error:
        return _json({"detail": str(error)}, 503, **{"Retry-After": str(RETRY_AFTER)})
    except (Conflict, FencedOut) as error:
        return _json({"status": "error", "message": str(error), "detail": str(error), "batch": []}, 409)
    except StateError as error:
        log.error("%s %s: %s", request.method, request.path, error)
        return _json({"detail": str(error)}, 503, **{"Retry-After": str(RETRY_AFTER)})
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = f"{request.method} {request.path} is not served here" if error.status in (404, 405) else error.reason
        return _json({"detail": text}, error.status)
    except (ConnectionError, web.RequestPayloadError) as error:  # the client left, or its body is garbled
        log.info("%s %s: the client left: %s", request.method, request.path, error)
        return _json({"detail": f"no whole body came: {error}"}, 400)
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
        return _json({"detail": "a defect of this API; its log has the traceback"}, 500)


def _guard(settings: ApiSettings) -> Any:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if settings.token is not None:
            if not _authorized(request, settings.token):
                return _json({"detail": "this API wants its token: Authorization: Bearer …"}, 401)
        elif urlsplit(f"//{request.host}").hostname not in LOOPBACK_NAMES:
            # Without a token, the name a client used tells it from a web page that had its own name point here.
            return _json({"detail": f"host {request.host!r} is not loopback; use http://127.0.0.1"}, 403)
        if request.headers.get("Sec-Fetch-Site", "none") not in {"none", "same-origin"}:
            return _json({"detail": "web pages of others are not answered"}, 403)
        return await handler(request)

    return guard


def _authorized(request: web.Request, token: str) -> bool:
    """A bearer token, or a password of basic authentication: what `http://:TOKEN@host` makes of an unchanged client."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "basic":
        with contextlib.suppress(binascii.Error, UnicodeDecodeError):
            given = base64.b64decode(given).decode().partition(":")[2]
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
