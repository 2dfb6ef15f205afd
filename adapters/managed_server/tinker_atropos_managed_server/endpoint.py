"""Puts the newest policy behind HTTP for as long as a block lasts: address, tokenizer for clients, clean end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web
from tinker_atropos import ConfigError, RunError
from tinker_atropos.external import EndpointSettings, PolicySource, Proven
from tinker_atropos.trajectory import FloatArray, IntArray

from tinker_atropos_managed_server.client_tokenizer import write_client_tokenizer
from tinker_atropos_managed_server.inference import Inference
from tinker_atropos_managed_server.sampled_turns import SampledTurns
from tinker_atropos_managed_server.server import Access, Counts, Routes
from tinker_atropos_managed_server.session import ManagedSessions
from tinker_atropos_managed_server.turn_records import TurnRecords

if TYPE_CHECKING:
    from tinker_atropos_managed_server import ManagedServerConfig

log = logging.getLogger(__name__)

BACKLOG = 1024
_EXTRA = frozenset({"aliases", "tls_certificate", "tls_key", "wandb_group", "wandb_project"})


class Endpoint:
    """A `PolicyEndpoint`: see `tinker_atropos.external.PolicyEndpoint` for the contract.

    `tokenizer` and `context_length` are those of the first policy, so both wait for it: before, `tokenizer` raises
    `RunError` (unless the settings name one) and `context_length` is None.
    """

    def __init__(self, url: str, settings: EndpointSettings, journal: SampledTurns, counts: Counts) -> None:
        self.url = url
        self.token = settings.token
        self.model = settings.model
        self.counts = counts
        self.journal = journal
        self.context_length: int | None = None
        self._tokenizer = settings.tokenizer
        self._first = asyncio.Event()
        self._broken: BaseException | None = None

    @property
    def tokenizer(self) -> str:
        """What clients hand to `AutoTokenizer.from_pretrained`: a folder or a hub id."""
        if self._tokenizer is None:
            raise RunError("the endpoint knows no tokenizer before the first policy; await its ready() first")
        return self._tokenizer

    async def ready(self) -> None:
        """Wait for the first policy; raises what kept it from being opened."""
        await self._first.wait()
        if self._broken is not None:
            raise self._broken

    def seen(self) -> dict[str, int]:
        """Return the counts, by name: those of `Counts`, and the turns that were forgotten or could not be recorded."""
        counts = asdict(self.counts) | {"forgotten": self.journal.forgotten}
        return counts | ({"unrecorded": self.journal.unrecorded} if self.journal.on_disk else {})

    def prove(self, tokens: IntArray, logprobs: FloatArray | None = None) -> Proven:
        """Return what is known of `tokens int32[T]`; see `SampledTurns.prove`."""
        return self.journal.prove(tokens, logprobs)


@asynccontextmanager
async def serve_policy(
    config: ManagedServerConfig, source: PolicySource, settings: EndpointSettings
) -> AsyncIterator[Endpoint]:
    """Serve until the block ends. Where a policy is there already, its tokenizer is known from the beginning.

    Raises `ConfigError` for a busy port, an address beyond loopback without token and TLS, or wrong settings. At the
    end what is still being sampled is cancelled.
    """
    extra = _checked_extra(settings)
    tls = _tls(extra)
    sessions = ManagedSessions(config)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(_bind(settings, tls is not None))
        # Beside the records it outlives this process, so that who wrote it into a file finds it again.
        kept = None if settings.records is None else settings.records.absolute().parent / "tokenizer"
        folder = Path(stack.enter_context(_temporary_folder())) if kept is None else kept
        records = None if settings.records is None else TurnRecords(settings.records, config.journal_tokens)
        if records is not None:
            stack.callback(records.close)
        journal = await asyncio.to_thread(SampledTurns, config.journal_tokens, records)
        routes = Routes(Inference(sessions, source, journal), Access(settings.token), (settings.model,), extra)
        runner = web.AppRunner(
            routes.app(), access_log=None, shutdown_timeout=1.0, handler_cancellation=True, auto_decompress=False
        )
        stack.push_async_callback(runner.cleanup)
        endpoint = Endpoint(_url(listener, tls), settings, journal, routes.counts)
        learning = asyncio.create_task(_learn(endpoint, routes, sessions, source, extra, folder))
        stack.push_async_callback(_ended, learning)
        if source.newest is not None:
            await endpoint.ready()
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=tls).start()
        yield endpoint


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tinker-atropos-tokenizer-", ignore_cleanup_errors=True)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


async def _learn(
    endpoint: Endpoint,
    routes: Routes,
    sessions: ManagedSessions,
    source: PolicySource,
    extra: dict[str, Any],
    folder: Path,
) -> None:
    """Take from the first policy what clients want to know."""
    try:
        async with source.use() as policy:
            endpoint.context_length = policy.context_length
            if endpoint._tokenizer is None:
                tokenizer = await asyncio.to_thread(policy.tokenizer)
                template = sessions.client_template(tokenizer)
                endpoint._tokenizer = await asyncio.to_thread(write_client_tokenizer, tokenizer, template, folder)
            names = (endpoint.model, endpoint.tokenizer, *_aliases(extra))
            routes.names = tuple(dict.fromkeys(names))
    except Exception as error:
        endpoint._broken = error
        log.warning("the first policy could not be opened: %s", error)
    finally:
        endpoint._first.set()


def _checked_extra(settings: EndpointSettings) -> dict[str, Any]:
    unknown = sorted(set(settings.extra) - _EXTRA)
    if unknown:
        raise ConfigError(f"endpoint: {unknown[0]!r} is not known; there are {', '.join(sorted(_EXTRA))}")
    if not settings.model:
        raise ConfigError("endpoint: the model needs a name that clients can give; set one")
    if settings.token is not None and not settings.token.strip():
        raise ConfigError("endpoint: the token is blank; set one, or leave it out on loopback")
    _aliases(dict(settings.extra))
    return dict(settings.extra)


def _aliases(extra: dict[str, Any]) -> tuple[str, ...]:
    found = extra.get("aliases") or ()
    if isinstance(found, str) or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f"endpoint: aliases are {found!r}; expected a list of further names of the model")
    return tuple(found)


def _tls(extra: dict[str, Any]) -> ssl.SSLContext | None:
    certificate, key = extra.get("tls_certificate"), extra.get("tls_key")
    if certificate is None and key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(str(certificate), None if key is None else str(key))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"endpoint: the certificate {certificate!r} with key {key!r} can't be loaded: {error}"
        ) from error
    return context


def _bind(settings: EndpointSettings, encrypted: bool) -> socket.socket:
    """Return a socket that has the port; beyond loopback only with a token and TLS."""
    host, port = settings.host, settings.port
    address = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError as error:
        raise ConfigError(f"endpoint: host {host!r} is no IP address; use 127.0.0.1, or 0.0.0.0 for all") from error
    if not loopback and settings.token is None:
        raise ConfigError(
            f"endpoint: host {host!r} is not loopback, where a token is a must; set one, or use 127.0.0.1"
        )
    if not loopback and not encrypted:
        raise ConfigError(
            f"endpoint: host {host!r} is not loopback, where the token would be sent in the clear; set tls_certificate "
            "and tls_key, or use 127.0.0.1 behind a proxy that has them"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"endpoint: port {port} is out of range; choose 1 to 65535, or 0 for a free one")
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"endpoint: port {port} on {address} can't be had: {error.strerror or error}; choose another, or 0 for a "
            "free one"
        ) from error
    return listener


def _url(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    address, port = listener.getsockname()[:2]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(address).is_unspecified:  # bound to all, reached here by one of them
            address = "::1" if ":" in address else "127.0.0.1"
    return f"{'https' if tls else 'http'}://{f'[{address}]' if ':' in address else address}:{port}/v1"
