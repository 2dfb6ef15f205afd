"""A client of OpenAI-compatible endpoints: one answer to one question, tried again where that may help."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from tinker_atropos.errors import (
    ConfigError,
    ContextOverflow,
    MissingCredentials,
    PolicyUnavailable,
    TransientError,
    near,
)
from tinker_atropos.evaluation.subject import EndpointSubject, is_loopback

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS = 10.0
LOOK_SECONDS = 14.0
"""How long an endpoint may take to say that it is there."""

TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
MOST_SHOWN = 300


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer: its text without the stop, `finish` as the endpoint calls it, and tokens where it counts them.

    `matched` is the stop string that ended it, where the endpoint tells.
    """

    text: str
    finish: str
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    matched: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping; `from_dict` is its inverse."""
        return {
            "text": self.text,
            "finish": self.finish,
            "tool_calls": [dict(call) for call in self.tool_calls],
            "prompt_tokens": self.prompt_tokens,
            "sampled_tokens": self.sampled_tokens,
            "matched": self.matched,
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Reply:
        """Return the reply of a mapping."""
        return Reply(**{**content, "tool_calls": tuple(content["tool_calls"])})


class Busy(TransientError):
    """The endpoint asks to come again; `seconds` is how long it says to wait, None where it does not."""

    def __init__(self, message: str, seconds: float | None = None) -> None:
        super().__init__(message)
        self.seconds = seconds


def read_key(url: str, variable: str | None) -> str | None:
    """Return the key for an endpoint from an environment variable; None where the default one is not set.

    Raises `MissingCredentials` for a named variable that is not set, and `ConfigError` where the key would travel in
    clear.
    """
    key = os.environ.get(variable or KEY_VARIABLE, "").strip()
    if not key:
        if variable is not None:
            raise MissingCredentials(f"--key-env: {variable} is not set; export {variable}=… or leave --key-env out")
        return None
    if urlsplit(url).scheme == "http" and not is_loopback(url):
        if variable is None:
            return None  # the default key is not meant for just any server
        raise ConfigError(
            f"--key-env: {url} would get the key of {variable} in clear; use https:// beyond this machine"
        )
    if not key.isascii() or not key.isprintable():
        raise ConfigError(f"{variable or KEY_VARIABLE}: holds characters that no key has; copy it again")
    return key


class EndpointClient:
    """Asks one model of an endpoint. `model` is its name there, known after `look`; its key is in `key_variable`.

    `retries` are further tries of a request that failed for a passing reason; `say` shows one line to the user.
    """

    def __init__(
        self,
        subject: EndpointSubject,
        *,
        key_variable: str | None = None,
        retries: int,
        timeout: float,
        say: Callable[[str], None],
    ) -> None:
        self.subject, self.model = subject, subject.model or ""
        self._retries, self._timeout, self._say = retries, timeout, say
        self._key = read_key(subject.url, key_variable)
        self._variable = key_variable or KEY_VARIABLE
        self._http: httpx.AsyncClient | None = None

    async def __aenter__(self) -> EndpointClient:
        import httpx

        self._http = httpx.AsyncClient(
            headers={} if self._key is None else {"Authorization": f"Bearer {self._key}"},
            timeout=httpx.Timeout(self._timeout, connect=CONNECT_SECONDS, pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=not is_loopback(self.subject.url),  # no proxy leads to this machine
            follow_redirects=False,  # the key is for this host
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def look(self) -> None:
        """See that the endpoint is there and takes the key, and learn the model's name where none was given.

        Raises `ConfigError` with the cause within 15 s.
        """
        url = self.subject.url
        try:
            async with asyncio.timeout(LOOK_SECONDS):
                await _knock(url)
                status, body = await self._get_models()
        except (OSError, TransientError) as error:  # a TimeoutError is an OSError
            cause = str(error) or f"no answer within {LOOK_SECONDS:g} s"
            raise ConfigError(
                f"-m: the endpoint {url} can't be reached ({cause}); check address and port, and that a server runs "
                "there"
            ) from error
        self._refuse_key(status, body)
        names = _model_names(body) if status == 200 else []
        if self.model:
            if names and self.model not in names:
                self._say(
                    f"note: the endpoint lists no model {self.model!r}{near(self.model, names)}; it lists "
                    f"{_listing(names)}. It is asked all the same"
                )
            return
        if len(names) != 1:
            said = f"it lists {_listing(names)}" if names else f"it lists none (HTTP {status})"
            raise ConfigError(f"-m: which model of {url}? {said}; say {url}#MODEL or --model-name MODEL")
        self.model = names[0]

    async def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        """Return the answer to `POST path` (`/chat/completions` or `/completions`).

        Raises `PolicyUnavailable` after the last try, `ContextOverflow` where the question is too long, and
        `ConfigError` where no question to this model would be answered.
        """
        request = {"model": self.model, **body}
        return await retrying(lambda: self._once(path, request), self._retries, self._say)

    async def _once(self, path: str, body: Mapping[str, Any]) -> Reply:
        status, answer, headers = await self._send("POST", path, body)
        if status == 200:
            return _read(answer)
        self._refuse_key(status, answer)
        said = _said(answer)
        if status in TRANSIENT:
            raise Busy(f"{self.subject.url}{path} answered HTTP {status}: {said}", _wait(headers))
        if status == 404:
            raise ConfigError(
                f"-m: {self.subject.url}{path} answered HTTP 404 for the model {self.model!r}: {said}; check the "
                "address (it usually ends in /v1) and the model's name"
            )
        if status == 400 and "context" in said.lower() and ("length" in said.lower() or "token" in said.lower()):
            raise ContextOverflow(f"the endpoint has no room for the prompt: {said}")
        if 300 <= status < 400:
            raise ConfigError(
                f"-m: {self.subject.url} redirects (HTTP {status}) to {headers.get('location')!r:.200}; name that"
            )
        raise Refused(f"{self.subject.url}{path} refused the request, HTTP {status}: {said}")

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        import httpx

        assert self._http is not None, "used as a context manager"
        try:
            response = await self._http.request(method, self.subject.url + path, json=body)
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise Busy(f"{type(error).__name__} {error}".strip()) from error
        try:
            content = response.json()
        except ValueError:
            content = response.text
        return response.status_code, content, response.headers

    async def _get_models(self) -> tuple[int, Any]:
        status, body, _ = await self._send("GET", "/models")
        return status, body

    def _refuse_key(self, status: int, body: Any) -> None:
        if status not in (401, 403):
            return
        said = _said(body)
        if self._key is None:
            raise MissingCredentials(
                f"the endpoint {self.subject.url} wants a key (HTTP {status}: {said}); export {self._variable}=…, or "
                "name another variable with --key-env"
            )
        raise ConfigError(
            f"the endpoint {self.subject.url} does not take the key in {self._variable} (HTTP {status}: {said}); check "
            "it, or name another variable with --key-env"
        )


async def with_model_name(
    subject: EndpointSubject, key_variable: str | None, say: Callable[[str], None]
) -> EndpointSubject:
    """Return the endpoint with its model's name, asked for where none was given; raises `ConfigError` as `look`."""
    if subject.model is not None:
        return subject
    async with EndpointClient(subject, key_variable=key_variable, retries=0, timeout=LOOK_SECONDS, say=say) as client:
        await client.look()
        return replace(subject, model=client.model)


class Refused(PolicyUnavailable):
    """The endpoint understood the request and would refuse it again."""


async def retrying(call: Callable[[], Awaitable[T]], retries: int, say: Callable[[str], None]) -> T:
    """Return `call()`, tried again after growing pauses while it raises a `TransientError` other than `Refused`.

    Raises `PolicyUnavailable` with the last cause after `retries` further tries.
    """
    for attempt in range(retries + 1):
        try:
            return await call()
        except Refused:
            raise
        except TransientError as error:
            if attempt == retries:
                raise PolicyUnavailable(f"no answer in {attempt + 1} tries; the last cause: {error}") from error
            pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt) * random.uniform(0.75, 1.25)
            asked = getattr(error, "seconds", None)
            if asked is not None:
                pause = min(LONGEST_PAUSE, max(pause, asked))
            if attempt:  # one hiccup is no news
                say(f"try {attempt + 1} failed, again in {pause:.0f} s: {error}")
            await asyncio.sleep(pause)
    raise AssertionError("the last try returns or raises")


def _read(body: Any) -> Reply:
    """Return the reply in a body; raises `Busy` for one that is none, as a proxy in between may send."""
    try:
        choice = body["choices"][0]
        message = choice.get("message")
        content = choice["text"] if message is None else message.get("content")
        calls = () if message is None else tuple(message.get("tool_calls") or ())
        usage = body.get("usage") or {}
        matched = choice.get("stop_reason")
        return Reply(
            text=_text(content),
            finish=str(choice.get("finish_reason") or "stop"),
            tool_calls=calls,
            prompt_tokens=usage.get("prompt_tokens"),
            sampled_tokens=usage.get("completion_tokens"),
            matched=matched if isinstance(matched, str) else None,
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise Busy(f"the answer is no completion ({type(error).__name__}: {error}): {_said(body)}") from None


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if part.get("type") == "text")
    if not isinstance(content, str):
        raise TypeError(f"content is {type(content).__name__}")
    return content


def _said(body: Any) -> str:
    """Return what an error body says, on one line."""
    said: Any = body
    if isinstance(body, Mapping):
        said = body.get("error", body.get("message", body.get("detail", body)))
        if isinstance(said, Mapping):
            said = said.get("message", said)
    return " ".join(str(said).split())[:MOST_SHOWN] or "no reason given"


def _wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a `Retry-After` header, a number or a date; None where there is none."""
    value = headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        from datetime import UTC, datetime

        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None


def _model_names(body: Any) -> list[str]:
    try:
        return [str(entry["id"]) for entry in body["data"]]
    except (KeyError, TypeError):
        return []


def _listing(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


async def _knock(url: str) -> None:
    """Raise `OSError` where no connection comes about. Where a proxy leads there, its name need not resolve here.

    From a thread of its own: a name look-up that hangs must not hold the interpreter at its end.
    """
    parts = urlsplit(url)
    proxies = getproxies()
    if not is_loopback(url) and (proxies.get(parts.scheme) or proxies.get("all")):
        return
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()

    def settle(problem: str) -> None:
        if not answer.done():
            answer.set_result(problem)

    def connect() -> None:
        problem = ""
        try:
            socket.create_connection((host, port), timeout=CONNECT_SECONDS).close()
        except OSError as error:
            problem = error.strerror or str(error) or type(error).__name__
        except UnicodeError as error:  # a label too long for a host's name
            problem = f"{host!r}: {error}"
        with suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, problem)

    threading.Thread(target=connect, daemon=True, name="knock").start()
    problem = await answer
    if problem:
        raise OSError(problem)
