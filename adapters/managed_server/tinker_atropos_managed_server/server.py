"""The HTTP side of the endpoints: routes, bodies, who may ask, status codes. What is sampled lies in `inference`."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from tinker_atropos.errors import near
from tinker_atropos.trajectory import PolicyRef

from tinker_atropos_managed_server.answers import Refused, body_of, failure
from tinker_atropos_managed_server.fields import Fields
from tinker_atropos_managed_server.generate_dialects import generate_body, read_generate_request
from tinker_atropos_managed_server.inference import Inference, Served, body_numbers
from tinker_atropos_managed_server.openai_dialect import (
    Shape,
    chat_body,
    chunks,
    completion_body,
    health_body,
    is_health_check,
    read_chat_request,
    read_completion_request,
)
from tinker_atropos_managed_server.prompts import encode_chat, encode_prompt, read_chat, read_prompts

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 32 * 2**20
MAX_WAITING = 8192
MAX_HELD_BYTES = 2**30
"""Of all bodies together, from when a request comes until it is answered."""
READ_SECONDS = 60.0
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(slots=True)
class Counts:
    """What the endpoints saw: requests answered, refused (4xx), failed (503 and 500), gone; malformed tool calls."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    gone: int = 0
    health_checks: int = 0
    malformed_tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Access:
    """Who may ask: whoever sends `token`; without one, whoever calls this server by a loopback name."""

    token: str | None

    def check(self, request: web.Request) -> None:
        """Raise `Refused` for a request that may not be answered."""
        headers = request.headers
        origin = headers.get("Origin")
        if origin is not None and urlsplit(origin).hostname not in LOOPBACK_NAMES:
            raise Refused(f"pages of {origin!r:.80} may not ask here", status=403, code="forbidden_origin")
        if self.token is not None:
            given = headers.get("Authorization", "").removeprefix("Bearer ").strip()
            if not hmac.compare_digest(given.encode("utf-8", "surrogateescape"), self.token.encode()):
                raise Refused(
                    "the token is missing or wrong; send the header 'Authorization: Bearer TOKEN' (api_key)",
                    status=401,
                    code="invalid_api_key",
                )
        # Without a token, the name a client used is what tells it from a web page that had its own name point here.
        elif urlsplit(f"//{headers.get('Host', '')}").hostname not in LOOPBACK_NAMES:
            raise Refused(
                f"host {headers.get('Host')!r:.80} is not loopback; use http://127.0.0.1",
                status=403,
                code="forbidden_host",
            )


@dataclass(slots=True)
class Routes:
    """Answers every path. `names` are what clients may call the model, the first of them its own."""

    inference: Inference
    access: Access
    names: tuple[str, ...]
    info: Mapping[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    waiting: int = 0
    held_bytes: int = 0

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        posts = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completions,
            "/generate": self._generate,
            "/generate/": self._generate,
            "/logprobs": self._logprobs,
            "/v1/logprobs": self._logprobs,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
        }
        app.add_routes([web.post(path, self._answering(handle, reads=True)) for path, handle in posts.items()])
        gets = {
            "/": self._root,
            "/v1/models": self._models,
            "/v1/models/{name:.+}": self._model,
            "/wandb_info": self._wandb_info,
        }
        app.add_routes([web.get(path, self._answering(handle)) for path, handle in gets.items()])
        for path in ("/health", "/health_generate"):
            app.add_routes([web.get(path, self._answering(self._health, guarded=False))])
        known = dict.fromkeys(posts, "POST") | dict.fromkeys((*gets, "/health", "/health_generate"), "GET")

        async def unknown(request: web.Request, _: Any) -> web.StreamResponse:
            method = known.get(request.path)
            if method is not None:
                raise Refused(f"{request.path} takes {method}, not {request.method}", status=405)
            raise Refused(
                f"{request.method} {request.path:.80} is not served here.{near(request.path, known)}".rstrip(),
                status=404,
            )

        app.router.add_route("*", "/{tail:.*}", self._answering(unknown))
        return app

    def _answering(
        self,
        handle: Callable[[web.Request, Any], Awaitable[web.StreamResponse]],
        *,
        reads: bool = False,
        guarded: bool = True,
    ) -> Handler:
        """Return a handler that checks who asks, reads the body as JSON, and answers errors in OpenAI's form."""

        async def answer(request: web.Request) -> web.StreamResponse:
            if self.waiting >= MAX_WAITING:
                body = body_of(f"{self.waiting} requests are waiting; ask again in a moment", "rate_limit_error")
                return _json(body, 429, retry=True)
            size = _body_bytes(request) if reads else 0
            if self.held_bytes + size > MAX_HELD_BYTES:
                message = (
                    f"the requests that wait hold {self.held_bytes} bytes, and with {size} more it would be above "
                    f"{MAX_HELD_BYTES}; ask again in a moment"
                )
                return _json(body_of(message, "rate_limit_error"), 429, retry=True)
            self.held_bytes += size
            self.waiting += 1
            try:
                if guarded:
                    self.access.check(request)
                response = await handle(request, await _read(request) if reads else None)
                self.counts.answered += 1
                return response
            except asyncio.CancelledError:
                self.counts.gone += 1
                raise
            except ConnectionError:  # the client left in the middle of a stream
                self.counts.gone += 1
                raise
            except web.RequestPayloadError as error:
                self.counts.refused += 1
                return _json(body_of(f"no whole body came: {error}", "invalid_request_error"), 400)
            except Exception as error:
                status, body = failure(error)
                self.counts.refused += status < 500
                self.counts.failed += status >= 500
                return _json(body, status, retry=status == 503)
            finally:
                self.waiting -= 1
                self.held_bytes -= size

        return answer

    async def _chat(self, request: web.Request, body: Any) -> web.StreamResponse:
        if is_health_check(body):
            return self._healthy(body, chat=True)
        asked = read_chat_request(body)
        self._check_model(asked.model)
        async with self.inference.served() as served:
            prompt = await encode_chat(served.dialect, asked.chat, served.limit)
            (answer,) = await self.inference.run(served, [prompt], [asked.sampling])
            made, malformed = chat_body(self.names[0], served.dialect, asked, answer)
        self.counts.malformed_tool_calls += malformed
        return await _openai_answer(request, made, answer.ref, asked.shape)

    async def _completions(self, request: web.Request, body: Any) -> web.StreamResponse:
        if is_health_check(body):
            return self._healthy(body, chat=False)
        asked = read_completion_request(body)
        self._check_model(asked.model)
        async with self.inference.served() as served:
            prompts = [
                await encode_prompt(served.dialect, prompt, served.limit, specials=asked.specials)
                for prompt in asked.prompts
            ]
            answers = await self.inference.run(served, prompts, [asked.sampling] * len(prompts), score=asked.score)
            made = completion_body(self.names[0], served.dialect, asked, answers)
        return await _openai_answer(request, made, answers[0].ref, asked.shape)

    async def _generate(self, request: web.Request, body: Any) -> web.StreamResponse:
        asked = read_generate_request(body)
        async with self.inference.served() as served:
            prompts = [
                await encode_prompt(served.dialect, prompt, served.limit, specials=asked.specials)
                for prompt in asked.prompts
            ]
            answers = await self.inference.run(served, prompts, asked.samplings, score=asked.score)
            made = generate_body(served.dialect, asked, answers)
        return _json(made, 200, answers[0].ref)

    async def _logprobs(self, request: web.Request, body: Any) -> web.StreamResponse:
        fields = Fields(body)
        self._check_model(fields.text("model"))
        specials = fields.flag("add_special_tokens", True)
        async with self.inference.served() as served:
            if "messages" in body:
                prompts, batch = [await encode_chat(served.dialect, read_chat(fields), served.limit)], False
            else:
                raw, batch = read_prompts(*_prompt_of(fields))
                prompts = [await encode_prompt(served.dialect, one, served.limit, specials=specials) for one in raw]
            fields.finish()
            scores = [body_numbers(await self.inference.score(served, prompt)) for prompt in prompts]
            ref = served.ref
        tokens = [prompt.tolist() for prompt in prompts]
        made = {
            "tokens": tokens if batch else tokens[0],
            "logprobs": scores if batch else scores[0],
            "policy_step": ref.step,
        }
        return _json(made, 200, ref)

    async def _tokenize(self, request: web.Request, body: Any) -> web.StreamResponse:
        fields = Fields(body)
        self._check_model(fields.text("model"))
        specials = fields.flag("add_special_tokens", True)
        texts = fields.flag("return_token_strs")
        async with self.inference.served() as served:
            if "messages" in body:
                tokens = (await encode_chat(served.dialect, read_chat(fields), None)).tolist()
            else:
                name = "prompt" if "prompt" in body else "text"
                text = fields.text(name)
                if text is None:
                    raise Refused("send 'prompt', a text, or 'messages'", param="prompt")
                tokens = (await _tokens_of(served, text, specials)) if text else []
            fields.finish()
            made = {
                "tokens": tokens,
                "count": len(tokens),
                "max_model_len": served.limit,
                "token_strs": [served.dialect.vocabulary.token_text(token) for token in tokens] if texts else None,
            }
        return _json(made)

    async def _detokenize(self, request: web.Request, body: Any) -> web.StreamResponse:
        fields = Fields(body)
        self._check_model(fields.text("model"))
        tokens = fields.sequence("tokens")
        async with self.inference.served() as served:
            vocabulary = served.dialect.vocabulary
            for token in tokens:
                if type(token) is not int or not 0 <= token < vocabulary.size:
                    raise Refused(
                        f"tokens has {token!r:.80}; send token ids, which go from 0 to {vocabulary.size - 1}",
                        param="tokens",
                    )
            skip = fields.flag("skip_special_tokens")
            fields.finish()
            shown = [token for token in tokens if not (skip and token in vocabulary.texts)]
            text = (
                await asyncio.to_thread(vocabulary.decode, shown) if len(shown) > 10_000 else vocabulary.decode(shown)
            )
        return _json({"prompt": text, "text": text})

    async def _models(self, request: web.Request, _: Any) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._described(name) for name in self.names[:1]]})

    async def _model(self, request: web.Request, _: Any) -> web.StreamResponse:
        name = request.match_info["name"]
        self._check_model(name)
        return _json(self._described(name))

    async def _wandb_info(self, request: web.Request, _: Any) -> web.StreamResponse:
        return _json({"group": self.info.get("wandb_group"), "project": self.info.get("wandb_project")})

    async def _root(self, request: web.Request, _: Any) -> web.StreamResponse:
        return _json({"message": "tinker-atropos policy endpoints", "model": self.names[0]})

    async def _health(self, request: web.Request, _: Any) -> web.StreamResponse:
        ready = self.inference.ready
        body = (
            {"status": "ok"} if ready else body_of("there is no policy yet", "service_unavailable", None, "not_ready")
        )
        return _json(body, 200 if ready else 503, self.inference.newest, retry=not ready)

    def _healthy(self, body: Mapping[str, Any], *, chat: bool) -> web.Response:
        """Answer Atropos' health check without sampling, as a hosted policy would bill for it each second."""
        self._check_model(body.get("model"))
        newest = self.inference.require_newest()
        self.counts.health_checks += 1
        response = _json(health_body(self.names[0], chat, newest.step), 200, newest)
        response.headers["x-health-check"] = "1"
        return response

    def _described(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "tinker-atropos",
            "root": self.names[0],
            "max_model_len": self.inference.context_length,
        }

    def _check_model(self, model: Any) -> None:
        if model is not None and model not in self.names:
            raise Refused(
                f"the model {model!r:.80} is not served here, {self.names[0]!r} is; send that, or no model",
                param="model",
                code="model_not_found",
                status=404,
            )


def _prompt_of(fields: Fields) -> tuple[Any, str]:
    for name in ("input_ids", "tokens", "prompt", "text"):
        value = fields.take(name)
        if value is not None:
            return value, name
    raise Refused("send 'input_ids' (token ids), 'prompt' (text) or 'messages'", param="prompt")


async def _tokens_of(served: Served, text: str, specials: bool) -> list[int]:
    found: list[int] = (await encode_prompt(served.dialect, text, None, specials=specials)).tolist()
    return found


def _body_bytes(request: web.Request) -> int:
    """Return the most that the body may take; one that does not say its length may be as large as any."""
    length = request.content_length
    return MAX_BODY_BYTES if length is None and request.can_read_body else min(length or 0, MAX_BODY_BYTES)


async def _read(request: web.Request) -> Any:
    """Return the body as JSON; raises `Refused` for what is none, is too large, or takes too long to arrive."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise Refused("compressed bodies are not read here; send it as it is", status=415)
    try:
        if request.content.is_eof():
            raw = await request.read()
        else:
            async with asyncio.timeout(READ_SECONDS):
                raw = await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise Refused(
            f"the body is larger than {MAX_BODY_BYTES} bytes; send less at a time", status=413, code="too_large"
        ) from error
    except TimeoutError as error:
        raise Refused(f"the body did not arrive within {READ_SECONDS:g} s; send it again", status=408) from error
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise Refused(f"the body is no JSON: {error}") from error


def _json(body: Any, status: int = 200, ref: PolicyRef | None = None, *, retry: bool = False) -> web.Response:
    headers = {}
    if ref is not None:
        headers["x-policy-step"] = str(ref.step)
    if retry:
        headers["Retry-After"] = "1"
    return web.Response(body=_dumped(body), status=status, headers=headers, content_type="application/json")


def _dumped(body: Any) -> bytes:
    try:
        return orjson.dumps(body)
    except TypeError:  # half a surrogate pair, which only an error text or an echo can bring here
        import json

        return json.dumps(body, ensure_ascii=True).encode()


async def _openai_answer(
    request: web.Request, body: dict[str, Any], ref: PolicyRef, shape: Shape
) -> web.StreamResponse:
    """Answer with one JSON body, or with the same in chunks: the policies here hand out finished samples alone."""
    if not shape.stream:
        return _json(body, 200, ref)
    headers = {"x-policy-step": str(ref.step), "Cache-Control": "no-cache", "Content-Type": "text/event-stream"}
    response = web.StreamResponse(headers=headers)
    await response.prepare(request)
    for chunk in chunks(body, shape.usage):
        await response.write(b"data: " + _dumped(chunk) + b"\n\n")
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response
