"""The HTTP side of the server: routes, bodies, status codes. What is done lies in `service`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web
from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker import rest
from tinker_atropos_local_tinker.answers import failure, status_of
from tinker_atropos_local_tinker.fields import mapping, number, read_json, whole
from tinker_atropos_local_tinker.futures import LONG_POLL_SECONDS
from tinker_atropos_local_tinker.service import Service
from tinker_atropos_local_tinker.wire import MAX_BODY_BYTES, decode_pass

log = logging.getLogger(__name__)

TIDY_SECONDS = 15.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

# What the SDK may do with this server; see its ClientConfigResponse. One poll a sampler instead of one connection a
# request, numbered clients where samplers are shared by handle, custom losses on the client's side.
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": False,
    "use_pyqwest_transport": False,
    "sample_use_retrieve_futures": True,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
}
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}


def make_app(service: Service) -> web.Application:
    """Return the application that serves `service`, and closes it at its end."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors, _loopback_only])
    routes = _Routes(service)
    post: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
        "client/config": _constant(CLIENT_CONFIG),
        "client/dynamic_config": _constant(DYNAMIC_CONFIG),
        "telemetry": _constant({"status": "accepted"}),
        "create_session": routes.create_session,
        "session_heartbeat": routes.heartbeat,
        "sessions/{session}/finish": routes.finish,
        "create_model": routes.create_model,
        "get_info": routes.get_info,
        "forward_backward": routes.forward_backward,
        "optim_step": routes.optim_step,
        "save_weights": routes.save_weights,
        "save_weights_for_sampler": routes.save_for_sampler,
        "save_weights_external": routes.save_external,
        "load_weights": routes.load_weights,
        "create_sampling_session": routes.create_sampling_session,
        "join_sampling_session": routes.join,
        "asample": routes.asample,
        "cancel_future": routes.cancel,
        "retrieve_future": routes.retrieve,
        "retrieve_futures": routes.retrieve_any,
    }
    app.add_routes([web.post(f"/api/v1/{path}", handler) for path, handler in post.items()])
    app.add_routes(
        [
            web.get("/api/v1/healthz", _constant({"status": "ok"})),
            web.get("/api/v1/samplers/{sampler}", routes.sampler),
        ]
    )
    rest.add_routes(app, service)

    async def tidy(app: web.Application) -> AsyncIterator[None]:
        async def now_and_then() -> None:
            while True:
                await asyncio.sleep(TIDY_SECONDS)
                try:
                    service.tidy()
                    await asyncio.to_thread(service.store.checkpoints)  # deletes expired ones
                except Exception:  # a damaged checkpoint must not end the expiry of everything else
                    log.exception("tidying up failed")

        task = asyncio.create_task(now_and_then())
        yield
        task.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        finally:
            await asyncio.to_thread(service.close)

    app.cleanup_ctx.append(tidy)
    return app


@web.middleware
async def _loopback_only(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    # Without keys, the name a client used is what tells it from a web page that had its own name point here.
    if urlsplit(f"//{request.host}").hostname not in LOOPBACK_NAMES:
        return web.json_response({"detail": f"host {request.host!r} is not loopback; use http://127.0.0.1"}, status=403)
    return await handler(request)


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        text = f"{request.method} {request.path} is not served here" if error.status in (404, 405) else error.reason
        return web.json_response({"detail": text}, status=error.status)
    except (ConnectionError, web.RequestPayloadError) as error:  # the client left, or its body is garbled
        log.info("%s %s: no whole body came: %s", request.method, request.path, error)
        return web.json_response({"detail": f"no whole body came: {error}", "category": "user"}, status=400)
    except (KeyError, TypeError, ValueError) as error:
        log.info("%s %s: %r", request.method, request.path, error)
        text = f"the request can't be understood: {type(error).__name__}: {error}"
        return web.json_response({"detail": text, "category": "user"}, status=400)
    except Exception as error:
        if not isinstance(error, UserError):
            log.exception("%s %s failed", request.method, request.path)
        body = failure(error)
        return web.json_response({"detail": body["error"], "category": body["category"]}, status=status_of(error))


def _constant(body: Any) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(body)

    return answer


def _accepted(request_id: str, model_id: str | None = None) -> web.Response:
    return web.json_response({"request_id": request_id, "model_id": model_id})


class _Routes:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def create_session(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        return web.json_response(self._service.create_session(body))

    async def heartbeat(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        self._service.session(body.get("session_id"))
        return web.json_response({"type": "session_heartbeat"})

    async def finish(self, request: web.Request) -> web.Response:
        self._service.finish_session(request.match_info["session"])
        return web.Response(status=204)

    async def create_model(self, request: web.Request) -> web.Response:
        body, raw = await read_json(request)
        return _accepted(self._service.create_model(body, raw))

    async def get_info(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        service = self._service
        model = service.training.lane(str(body.get("model_id"))).made()
        # The SDK's get_tokenizer reads `model_data`; a folder there keeps it from asking the hub.
        data = {
            "arch": type(service.base.model).__name__,
            "model_name": service.base.tokenizer_path,
            "tokenizer_id": service.base.tokenizer_path,
        }
        return web.json_response(
            {
                "type": "get_info",
                "model_data": data,
                "model_id": model.model_id,
                "is_lora": True,
                "lora_rank": model.spec.rank,
                "model_name": service.base.name,
            }
        )

    async def forward_backward(self, request: web.Request) -> web.Response:
        raw = await request.read()
        decoded = await asyncio.to_thread(decode_pass, raw)
        return _accepted(self._service.run_pass(decoded, raw), decoded.model_id)

    async def optim_step(self, request: web.Request) -> web.Response:
        return _accepted(self._service.optim_step(*await read_json(request)))

    async def save_weights(self, request: web.Request) -> web.Response:
        return _accepted(self._service.save("weights", *await read_json(request)))

    async def save_external(self, request: web.Request) -> web.Response:
        return _accepted(self._service.save("external_weights", *await read_json(request)))

    async def save_for_sampler(self, request: web.Request) -> web.Response:
        return _accepted(self._service.save_for_sampler(*await read_json(request)))

    async def load_weights(self, request: web.Request) -> web.Response:
        return _accepted(self._service.load(*await read_json(request)))

    async def create_sampling_session(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        return web.json_response(await self._service.create_sampling_session(body))

    async def join(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        sampler = self._service.samplers.get(str(body.get("sampling_session_id")))
        sampler.clients += 1
        return web.json_response({"type": "join_sampling_session", "client_counter": sampler.clients})

    async def sampler(self, request: web.Request) -> web.Response:
        sampler = self._service.samplers.get(request.match_info["sampler"])
        return web.json_response(
            {
                "sampler_id": sampler.sampler_id,
                "base_model": self._service.base.tokenizer_path,
                "model_path": sampler.model_path,
            }
        )

    async def asample(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        return web.json_response(self._service.sample(body))

    async def cancel(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        self._service.cancel(str(body.get("request_id")))
        return web.Response(status=204)

    async def retrieve(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        request_id = str(body.get("request_id"))
        answer = await self._service.futures.wait(request_id)
        if answer is None:
            # The SDK asks again on 408 without a word; on a `try_again` body it would log a warning each time.
            body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return web.json_response(body, status=408)
        return web.Response(body=answer.body, content_type=answer.content_type)

    async def retrieve_any(self, request: web.Request) -> web.Response:
        body, _ = await read_json(request)
        target = mapping(body, "target") or {}
        sampler = self._service.samplers.get(str(target.get("sampling_session_id")))
        self._service.futures.forget(body.get("retrieved_request_ids") or [])
        wanted = body.get("timeout")
        seconds = LONG_POLL_SECONDS if wanted is None else min(number("timeout", wanted), LONG_POLL_SECONDS)
        client = sampler.sampler_id, whole("cloned_sampler_id", target.get("cloned_sampler_id", 0))
        cursor = whole("prev_cursor", body.get("prev_cursor", 0))
        items, cursor = await self._service.futures.wait_any(client, cursor, seconds)
        return web.json_response({"completions": items, "cursor": cursor})
