"""Connections to a Tinker service: one session per service in a process, however many policies are opened there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from tinker_atropos.errors import ConfigError, RunError, TrainerError, near
from tinker_atropos.trajectory import PolicyRef

from tinker_atropos_tinker.config import TinkerConfig, is_loopback
from tinker_atropos_tinker.local import local_adapter
from tinker_atropos_tinker.preflight import check_key, endpoint, has_stored_key

if TYPE_CHECKING:
    import tinker

T = TypeVar("T")

HANDLE = "tinker-sampler:"
"""Begins the uri of a policy that lives as long as its trainer's session; the rest is the SDK's sampler handle."""

PATH = "tinker://"
"""Begins the uri of a policy whose weights were saved."""

BASE = "tinker-base:"
"""Begins the uri of a policy that is a base model as it is; the rest is the model's name."""

CONNECT_SECONDS = 10.0

ANSWER_SECONDS = 60.0
"""How long a question to the service's catalogue may take, with the SDK's own retries."""

_NO_KEY = "tml-none"  # a server on this machine may ask for none, but the SDK will not send a request without


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service is and what to say there; None: what the SDK finds in the environment."""

    url: str | None
    key: str | None


def sdk() -> Any:
    """Return the SDK's module. Its telemetry stays off unless the user set `TINKER_TELEMETRY` himself."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    import tinker

    return tinker


def address(config: TinkerConfig, url: str | None = None) -> Address:
    """Return the address of the service at `url`, or of the configured one.

    A server that `--local` started is never shown the user's own key.
    """
    url = url or endpoint(config)
    if config.local:
        return Address(url, str(local_adapter().LOCAL_API_KEY))
    if url is not None and is_loopback(url) and not _has_credential():
        return Address(url, _NO_KEY)
    check_key(config)
    return Address(url, None)


def _has_credential() -> bool:
    return bool(os.environ.get("TINKER_API_KEY") or os.environ.get("TINKER_CREDENTIAL_CMD")) or has_stored_key()


async def off_loop(call: Callable[[], T]) -> T:
    """Return `call()` from a thread of its own: the SDK blocks where it connects, for minutes if nothing answers.

    A daemon, so that a call which was given up does not hold the interpreter at its end.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(value: T | None, error: Exception | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(value)  # type: ignore[arg-type]

    def run() -> None:
        value, error = None, None
        try:
            value = call()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop was closed in the meantime
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(target=run, daemon=True, name="tinker-connect").start()
    return await answer


async def answer(request: Awaitable[T], what: str, seconds: float | None = None) -> T:
    """Await an answer of the catalogue for `ANSWER_SECONDS` at most; raises `TimeoutError` that names the question."""
    seconds = ANSWER_SECONDS if seconds is None else seconds
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            return await request
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"{what}: no answer from the service within {seconds:g} s") from error
        raise


async def refuse_unreachable(where: Address) -> None:
    """Raise `TrainerError` with the cause where no connection to a service comes about; the SDK would try on.

    Whatever answers there will do. Where a proxy leads to it, its name need not resolve here, so nothing is checked.
    """
    url = await off_loop(_hosted_url) if where.url is None else where.url
    parts = urlsplit(url)
    here, proxies = is_loopback(url), getproxies()
    if not here and (proxies.get(parts.scheme) or proxies.get("all")):
        return
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            await off_loop(lambda: _knock(host, port))
    except OSError as error:
        cause = error.strerror or str(error) or f"no connection within {CONNECT_SECONDS:g} s"
        if here:
            way_on = "start the server there, correct tinker.base_url or TINKER_BASE_URL, or use --local"
            raise TrainerError(f"nothing answers at {url} ({cause}); {way_on}") from error
        raise TrainerError(
            f"the Tinker service at {url} can't be reached ({cause}): check the network, set HTTPS_PROXY where a proxy "
            "leads out, name another server with TINKER_BASE_URL, or train on this machine with --local"
        ) from error


def _hosted_url() -> str:
    sdk()
    from tinker.lib.base_url import resolve_base_url

    return str(resolve_base_url())


def _knock(host: str, port: int) -> None:
    """Connect to one of the addresses of a host, with an equal share of the time for each."""
    ways = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    socket.create_connection((host, port), timeout=CONNECT_SECONDS / len(ways)).close()


async def new_service(where: Address, run: str | None = None) -> tinker.ServiceClient:
    """Open a session of its own; the SDK blocks while it does, so a thread waits."""

    def connect() -> Any:
        service = sdk().ServiceClient(
            base_url=where.url, api_key=where.key, user_metadata={"tinker_atropos_run": run} if run else None
        )
        _ = service.holder  # the session is opened on first use, which must not be on our event loop
        return service

    return await off_loop(connect)


_services: dict[Address, tinker.ServiceClient] = {}
_services_lock = threading.Lock()


async def shared_service(where: Address) -> tinker.ServiceClient:
    """Return this process's session at a service, opened on first use and kept."""

    def connect() -> Any:
        with _services_lock:
            if where not in _services:
                service = sdk().ServiceClient(base_url=where.url, api_key=where.key)
                _ = service.holder
                _services[where] = service
            return _services[where]

    return await off_loop(connect)


async def forget_service(where: Address) -> None:
    """Close this process's session at a service that is about to go."""
    service = _services.pop(where, None)
    _models.pop(where, None)
    if service is not None:
        await service.close("success")


def abandon_service(where: Address, service: tinker.ServiceClient) -> None:
    """Let go of the sessions at a service that is gone, asking it nothing: neither heartbeats nor retries are left."""
    _models.pop(where, None)
    for session in (service, _services.pop(where, None)):
        if session is not None:
            session.holder.close()


async def rest_client(where: Address) -> tinker.RestClient:
    """Return a client of the service's catalogue, which needs no session.

    The SDK connects for the first one under a lock of the whole process, for minutes where nothing is: so ask first.
    """
    await refuse_unreachable(where)
    return await off_loop(lambda: sdk().RestClient(base_url=where.url, api_key=where.key))


_models: dict[Address, dict[str, Any]] = {}


async def models(where: Address) -> dict[str, Any]:
    """Return what the service says of each model it has, by name; asked once."""
    if where not in _models:
        rest = await answer(rest_client(where), "the service's catalogue")
        capabilities = await answer(rest.get_server_capabilities(), "the list of models")
        _models[where] = {entry.model_name: entry for entry in capabilities.supported_models if entry.model_name}
    return _models[where]


async def unlisted(where: Address, paths: list[str]) -> list[str]:
    """Return which checkpoints of one training run the service does not list, asked again after 1 and 3 s."""
    rest = await rest_client(where)
    run = paths[0].removeprefix(PATH).split("/")[0]
    absent = paths
    for patience in (0.0, 1.0, 3.0):
        await asyncio.sleep(patience)
        listed = {entry.tinker_path for entry in (await rest.list_checkpoints(run)).checkpoints}
        absent = [path for path in paths if path not in listed]
        if not absent:
            break
    return absent


async def check_model(where: Address, model: str) -> None:
    """Raise `ConfigError` with the near name unless the service trains `model`."""
    offered = {name: entry for name, entry in (await models(where)).items() if entry.trainable is not False}
    if model not in offered:
        listing = ", ".join(sorted(offered)) or "none"
        raise ConfigError(
            f"the Tinker service does not train a model {model!r}.{near(model, offered)} It trains: {listing}"
        )


async def context_length(where: Address, model: str) -> int | None:
    """Return how many tokens prompt and completion may have together, None where the service does not say.

    A service of one model may call it by its folder in one answer and by its name in another; it is that one all the
    same.
    """
    known = await models(where)
    entry = known.get(model) or (next(iter(known.values())) if len(known) == 1 else None)
    return None if entry is None else entry.max_context_length


# Weak: a sampler is kept by the policies and the trainer that use it.
_samplers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def sampler_uri(client: tinker.SamplingClient) -> str:
    """Return the uri under which this sampler is opened here or in another process; it carries no key."""
    uri: str = HANDLE + client.get_sampler_handle()
    _samplers[uri] = client
    return uri


async def open_sampler(ref: PolicyRef, where: Address) -> tinker.SamplingClient:
    """Return the sampler behind a reference; in the process that made it, the very same one."""
    known = _samplers.get(ref.uri)
    if known is not None:
        return known
    if ref.uri.startswith(PATH):
        service = await shared_service(where)
        client = await service.create_sampling_client(model_path=ref.uri)
    elif ref.uri.startswith(BASE):
        service = await shared_service(where)
        client = await service.create_sampling_client(base_model=ref.uri.removeprefix(BASE))
    elif ref.uri.startswith(HANDLE):
        handle = ref.uri.removeprefix(HANDLE)
        client = await off_loop(lambda: sdk().SamplingClient.from_sampler_handle(handle, api_key=where.key))
    else:
        raise RunError(f"policy {ref.uri[:80]!r} is none of the Tinker trainer; expected {PATH}… or {HANDLE}…")
    _samplers[ref.uri] = client
    return client
