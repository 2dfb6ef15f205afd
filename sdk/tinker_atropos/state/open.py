"""Opens the State that a configuration names."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal
from urllib.parse import quote, urlsplit, urlunsplit

from tinker_atropos.errors import ConfigError, near
from tinker_atropos.state.memory import MemoryState
from tinker_atropos.state.protocol import State

SCHEMES = ("redis", "rediss", "unix")
PASSWORD = "TINKER_ATROPOS_REDIS_PASSWORD"
"""The environment variable whose value is the password of an address that names none."""


async def open_state(
    address: str,
    run: str,
    cap: int,
    *,
    say: Callable[[str], None] | None = None,
    compress: Literal["none", "zlib", "zstd"] | None = None,
) -> State[Any]:
    """Return the State at `memory`, or at the URL of a Redis or Valkey: `redis://`, `rediss://` (TLS) or `unix://`.

    `cap` is how many items it holds. `say` is told when Redis does not answer, and when it does again (None: a log
    warning). `compress` None: large items as zstd where it is installed. Raises `ConfigError` for an address that is
    none, `StateError` within 15 s for a Redis that does not answer or can't keep a run.

    An address without a password takes the one in `TINKER_ATROPOS_REDIS_PASSWORD`.
    """
    if address == "memory":
        return MemoryState(cap)
    scheme = address.partition("://")[0]
    if "://" not in address or scheme not in SCHEMES:
        named = scheme if "://" in address else address.rsplit("@", 1)[-1]
        raise ConfigError(
            f"state {named!r} is unknown; use memory, or redis://host:port/0 (rediss:// for TLS, unix:///path)."
            f"{near(named, ['memory', *SCHEMES])}"
        )
    try:
        from tinker_atropos.state.redis import RedisState
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise ConfigError("a state in Redis needs its client: pip install 'tinker-atropos[redis]'") from None
    state = RedisState[Any](_with_password(address), run, cap, say=say, compress=compress)
    try:
        await state.open()
    except BaseException:
        await state.close()
        raise
    return state


def _with_password(address: str) -> str:
    password, parts = os.environ.get(PASSWORD), urlsplit(address)
    if not password or parts.password:
        return address
    user, at, place = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{user if at else ''}:{quote(password, safe='')}@{place}"))
