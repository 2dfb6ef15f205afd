"""Connections to a Tinker service: one session per service in a process, however many policies are opened there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

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

CONNECT_SECONDS = 10.0

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


async def refuse_silence(url: str) -> None:
    """Raise `TrainerError` where nothing listens at an address of this machine; the SDK would try on."""
    parts = urlsplit(url)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    except OSError as error:
        raise TrainerError(
            f"nothing answers at {url} ({error.strerror or error}); start the server there, correct tinker.base_url, "
            "or use --local"
        ) from error
    writer.close()


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


async def rest_client(where: Address) -> tinker.RestClient:
    """Return a client of the service's catalogue, which needs no session."""
    return await off_loop(lambda: sdk().RestClient(base_url=where.url, api_key=where.key))


_models: dict[Address, dict[str, Any]] = {}


async def models(where: Address) -> dict[str, Any]:
    """Return what the service says of each model it has, by name; asked once."""
    if where not in _models:
        capabilities = await (await rest_client(where)).get_server_capabilities()
        _models[where] = {entry.model_name: entry for entry in capabilities.supported_models if entry.model_name}
    return _models[where]


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
    elif ref.uri.startswith(HANDLE):
        handle = ref.uri.removeprefix(HANDLE)
        client = await off_loop(lambda: sdk().SamplingClient.from_sampler_handle(handle, api_key=where.key))
    else:
        raise RunError(f"policy {ref.uri[:80]!r} is none of the Tinker trainer; expected {PATH}… or {HANDLE}…")
    _samplers[ref.uri] = client
    return client
