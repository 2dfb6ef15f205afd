"""The Tinker API served from this machine: `start_local_server` for a child process, `serve` for this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_atropos import AdapterSpec, hookimpl

if TYPE_CHECKING:
    from tinker_atropos_local_tinker.download import download_checkpoint
    from tinker_atropos_local_tinker.launch import LocalServer, start_local_server
    from tinker_atropos_local_tinker.serving import LOCAL_API_KEY, serve

__all__ = ["LOCAL_API_KEY", "LocalServer", "adapter_spec", "download_checkpoint", "serve", "start_local_server"]

_HOME = {
    "LOCAL_API_KEY": "serving",
    "LocalServer": "launch",
    "download_checkpoint": "download",
    "serve": "serving",
    "start_local_server": "launch",
}


@hookimpl
def adapter_spec() -> AdapterSpec:
    """Describe this adapter."""
    return AdapterSpec(
        name="local_tinker",
        make=_make,
        serves="tinker",
        command=_command,
        description="the Tinker API, served from this machine over a torch engine",
    )


def _make(config: Any = None) -> Any:
    from tinker_atropos_local_tinker.launch import start_local_server

    return start_local_server


def _command() -> Any:
    from tinker_atropos_local_tinker.cli import command

    return command


def __getattr__(name: str) -> Any:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
