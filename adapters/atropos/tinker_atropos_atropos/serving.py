"""Serves the trajectory API in this process: checks where it may listen, then serves until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web
from tinker_atropos.errors import ConfigError

from tinker_atropos_atropos.api import ApiSettings, make_app
from tinker_atropos_atropos.backend import Backend

DEFAULT_PORT = 8000
BACKLOG = 1024


def bind(host: str, port: int, *, guarded: bool) -> socket.socket:
    """Return a socket that has the port; beyond loopback only where TLS and a token guard it (`guarded`)."""
    address = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        raise ConfigError(
            f"--host {host!r:.80} is no address; use 127.0.0.1, or 0.0.0.0 with --token-file and TLS"
        ) from None
    if not loopback and not guarded:
        raise ConfigError(
            f"--host {host} is not loopback: whoever reaches it, or listens on the way, could post and take data; "
            "give --token-file, --tls-cert and --tls-key, or use --host 127.0.0.1"
        )
    if not 0 <= port <= 65535:
        raise ConfigError(f"--port {port} is out of range; choose 1 to 65535, or 0 for a free one")
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"port {port} on {address} can't be had: {reason}; choose another, or 0 for a free one"
        ) from error
    return listener


def read_token(path: Path) -> str:
    """Return the token in a file; raises `ConfigError` if there is none worth the name."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file {path}: {error}") from error
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file {path}: a token has 16 or more characters and no blanks; `openssl rand -hex 32`"
        )
    return token


def tls_context(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the server's TLS, or None without a certificate; raises `ConfigError` if the files don't fit."""
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise ConfigError("TLS takes both --tls-cert and --tls-key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {certificate} with --tls-key {key}: {error}") from error
    return context


@asynccontextmanager
async def serving(
    backend: Backend,
    settings: ApiSettings | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve the API until the block ends; yields its base URL."""
    settings = settings or ApiSettings()
    listener = bind(host, port, guarded=settings.token is not None and tls is not None)
    runner = web.AppRunner(
        make_app(backend, settings),
        access_log=None,
        shutdown_timeout=2.0,
        auto_decompress=False,  # a body is decompressed within bounds, in `bodies`
    )
    try:
        await runner.setup()
        await web.SockSite(runner, listener, backlog=BACKLOG, ssl_context=tls).start()
        name = f"[{host}]" if ":" in host else host
        yield f"{'http' if tls is None else 'https'}://{name}:{listener.getsockname()[1]}"
    finally:
        await runner.cleanup()
        listener.close()


async def serve(
    backend: Backend,
    settings: ApiSettings,
    *,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve until SIGTERM or SIGINT; says `listening on …` once requests are answered."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, ended.set)
    async with serving(backend, settings, host=host, port=port, tls=tls) as url:
        say(f"listening on {url}")
        await ended.wait()
