"""Starts the server in this process: checks what it was given before anything heavy, then serves until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tinker_atropos.errors import ConfigError

log = logging.getLogger(__name__)

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_PORT = 8123
BACKLOG = 1024

LOCAL_API_KEY = "tml-local"
"""A key for the SDK, which insists on one that begins with `tml-`. The local server checks none."""

# Waiting threads of OpenMP spin by default, which on a busy machine takes the cores that the working ones need:
# 6 tokens a second instead of 87. Both must be set before torch is loaded.
QUIET_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}


def serve(
    *,
    store: Path,
    model: str = DEFAULT_MODEL,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    deterministic: bool = False,
    threads: int | None = None,
    device: str = "auto",
    dtype: str = "float32",
    parent_pipe: int | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serve the Tinker API on loopback until SIGTERM or SIGINT.

    Says `listening on http://127.0.0.1:PORT`, and then how to connect, once requests are answered. `port` 0 takes a
    free one. `parent_pipe` is a descriptor whose other end the parent holds: the server ends when the parent does.
    Raises `ConfigError` on a busy port, a store in use, an address beyond loopback or an unknown model.
    """
    if parent_pipe is not None:
        _end_with_parent(parent_pipe)
    for name, value in QUIET_THREADS.items():
        os.environ.setdefault(name, value)
    if threads is not None:
        if threads < 1:
            raise ConfigError(f"threads={threads} is out of range; give 1 or more, or leave it out")
        os.environ["OMP_NUM_THREADS"] = str(threads)
    from tinker_atropos_local_tinker.models import resolve_model
    from tinker_atropos_local_tinker.store import Store

    listener = _bind(host, port)
    held = Store(store)
    folder = resolve_model(model)
    log.info("loading %s from %s", folder.name, folder.path)

    import torch

    from tinker_atropos_local_tinker.base_model import load_base_model
    from tinker_atropos_local_tinker.engine import Engine

    if threads is not None:
        torch.set_num_threads(threads)
    base = load_base_model(folder.name, folder.path, device, dtype)
    engine = Engine(base)
    log.info("%s is loaded: %d tokens of context, on %s", base.name, base.context, base.device)
    asyncio.run(_serve(listener, base, engine, held, deterministic, say))


async def _serve(
    listener: socket.socket,
    base: object,
    engine: object,
    store: object,
    deterministic: bool,
    say: Callable[[str], None],
) -> None:
    from aiohttp import web

    from tinker_atropos_local_tinker.server import make_app
    from tinker_atropos_local_tinker.service import Service

    _raise_descriptor_limit()
    service = Service(base, engine, store, deterministic=deterministic)  # type: ignore[arg-type]
    runner = web.AppRunner(
        make_app(service),
        access_log=None,
        shutdown_timeout=2.0,
        auto_decompress=False,  # the one compressed body there is, zstd, is read in `wire`
    )
    await runner.setup()
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread
            loop.add_signal_handler(name, ended.set)
    address, port = listener.getsockname()[:2]
    url = f"http://{f'[{address}]' if ':' in address else address}:{port}"
    say(f"listening on {url}")
    say(
        f'connect with tinker.ServiceClient(base_url="{url}", api_key="{LOCAL_API_KEY}"); '
        f"any key that begins with tml- is accepted on loopback"
    )
    try:
        await ended.wait()
    finally:
        await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket that has the port; nothing but loopback, since no key is checked."""
    address = "127.0.0.1" if host == "localhost" else host
    try:
        loopback = ipaddress.ip_address(address).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(f"host {host!r} is not loopback, and this server checks no keys; use 127.0.0.1")
    if not 0 <= port <= 65535:
        raise ConfigError(f"port {port} is out of range; choose 1 to 65535, or 0 for a free one")
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


def _raise_descriptor_limit() -> None:
    """Allow as many open connections as the system lets this process have."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _end_with_parent(descriptor: int) -> None:
    """End this process when the parent has gone, however it went.

    The pipe tells at once. A process that the parent forked may hold its end open, so the parent's id is looked at
    too. (PR_SET_PDEATHSIG would also fire when only the thread that started us ends.)
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            ready, _, _ = select.select([descriptor], [], [], 1.0)
            if ready and not os.read(descriptor, 1):
                break
        os._exit(0)  # what matters is on the disk: journal lines are synced, checkpoints are moved in whole

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def log_to_stderr() -> None:
    """Send log lines to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
