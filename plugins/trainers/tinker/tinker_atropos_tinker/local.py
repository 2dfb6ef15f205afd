"""The Tinker API on this machine: found through the registry, so that this plugin works without its adapter."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tinker_atropos.errors import CheckpointError, PluginError, UpdateUncertain
from tinker_atropos.registry import Registry, normal

ADAPTER = "local_tinker"
STORE = "tinker"
_NOTE = "local_tinker.json"
_LOG_HEAD = re.compile(r"^[\d-]+ [\d:,.]+ [A-Z]+ [\w.]+: ")
_PROGRESS_BAR = re.compile(r"\d+%\|")


class LocalServer(Protocol):
    """A server process that ends with this one."""

    url: str
    pid: int

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        ...

    def close(self) -> None:
        """Stop it and wait until it is gone."""
        ...


def local_adapter(registry: Registry | None = None) -> Any:
    """Return the adapter's module; raises `PluginError` with the pip command where it is absent, or says what broke."""
    registry = Registry() if registry is None else registry
    found = [plugin for plugin in registry.listed("adapter") if normal(plugin.name) == ADAPTER]
    if not found:
        raise PluginError(
            "--local needs the adapter local_tinker, which is not installed: pip install tinker-atropos-local-tinker"
        )
    registry.load("adapter", ADAPTER)
    return importlib.import_module(found[0].module)


def check_local_model(name: str) -> None:
    """Raise `ConfigError` for a name that can't be a local model; asks no network."""
    _models().check_model_name(name)


def local_model_folder(name: str) -> Path:
    """Return the folder of a local model, fetched first where it must be."""
    return Path(_models().resolve_model(name).path)


def _models() -> Any:
    return importlib.import_module(f"{local_adapter().__name__}.models")


def local_store(folder: Path) -> Path:
    """Return where the server of a run keeps its checkpoints and its journal."""
    return folder / STORE


def stored_model(folder: Path) -> str:
    """Return the model that the run in `folder` trained on this machine; raises `CheckpointError` if none."""
    try:
        model = json.loads((folder / _NOTE).read_text(encoding="utf-8"))["model"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder} does not tell which model it trained ({_NOTE}: {error})") from error
    return str(model)


async def start_local(
    folder: Path,
    model: str,
    *,
    deterministic: bool = False,
    threads: int | None = None,
    say: Callable[[str], None] | None = None,
) -> LocalServer:
    """Start the server of a run on a free port; its log is `local_tinker.log` in the run folder.

    `say` gets the log's lines while it starts, from another thread.
    """
    adapter = local_adapter()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _NOTE).write_text(json.dumps({"model": model}) + "\n", encoding="utf-8")
    _reach_loopback_without_proxy()
    log = folder / "local_tinker.log"
    started = asyncio.ensure_future(
        asyncio.to_thread(
            adapter.start_local_server,
            local_store(folder),
            model=model,
            deterministic=deterministic,
            threads=threads,
            log=log,
            say=None if say is None else lambda line: _say_message(line, say),
        )
    )
    try:
        server: LocalServer = await asyncio.shield(started)
    except asyncio.CancelledError:
        started.add_done_callback(_close_late)
        raise
    _servers[server.url] = (server, log)
    return server


_servers: dict[str, tuple[LocalServer, Path]] = {}


def refuse_dead(url: str | None) -> None:
    """Raise `UpdateUncertain` where the server at `url` was started here and has ended: the SDK would wait for hours.

    The weights in training ended with it, whatever it was doing: the way on is a new server and the last manifest.
    """
    server, log = _servers.get(url or "", (None, None))
    if server is not None and not server.alive:
        raise UpdateUncertain(
            f"the local Tinker server (process {server.pid}) has ended (log {log}); where memory ran out, a smaller "
            "env.batch_size or env.max_token_length needs less"
        )


def stop_local(server: LocalServer) -> None:
    """Stop a server that was started here."""
    _servers.pop(server.url, None)
    server.close()


def _say_message(line: str, say: Callable[[str], None]) -> None:
    """Show a line of the server's log without its time and logger, and no progress bars."""
    text = _LOG_HEAD.sub("", line).strip()
    if text and not _PROGRESS_BAR.search(text):
        say(text)


def _close_late(started: asyncio.Future[Any]) -> None:
    """Stop a server whose starter was cancelled while it came up."""
    if not started.cancelled() and started.exception() is None:
        started.result().close()


def _reach_loopback_without_proxy() -> None:
    """Tell the HTTP clients of this process that no proxy leads to this machine."""
    for variable in ("NO_PROXY", "no_proxy"):
        spared = [host for host in os.environ.get(variable, "").split(",") if host]
        if "127.0.0.1" not in spared and "*" not in spared:
            os.environ[variable] = ",".join([*spared, "127.0.0.1"])
