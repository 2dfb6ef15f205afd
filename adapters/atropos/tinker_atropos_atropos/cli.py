"""The command `tinker-atropos run-api`, with the flags of atroposlib's `run-api` and its own."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(name="run-api")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=int, default=8000, show_default=True, help="Port; 0 takes a free one.")
@click.option("--reload", is_flag=True, help="Accepted for atroposlib's sake; without effect.")
@click.option("--state", default="memory", show_default=True, help="Where groups wait: memory, or redis://….")
@click.option("--run", default="atropos", show_default=True, help="Name of the run within the state.")
@click.option("--cap", type=int, default=2048, show_default=True, help="Groups held at most; posts wait beyond it.")
@click.option(
    "--cap-bytes", type=int, default=2 * 1024**3, show_default=True, help="Bytes that wait at most, compressed."
)
@click.option(
    "--hold", type=float, default=240.0, show_default=True, help="Seconds a post waits for room before a 503."
)
@click.option(
    "--patience",
    type=float,
    default=120.0,
    show_default=True,
    help="Seconds a batch waits for an environment's minimum after its last group.",
)
@click.option(
    "--repeat-window",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds within which a group of equal content, posted without a key, is the same one repeated.",
)
@click.option(
    "--silence",
    type=float,
    default=60.0,
    show_default=True,
    help="Seconds without a poll after which an environment counts no more, until its next.",
)
@click.option("--max-body", type=int, default=32 * 1024**2, show_default=True, help="Bytes of a body at most.")
@click.option(
    "--max-plain", type=int, default=128 * 1024**2, show_default=True, help="Bytes of a decompressed body at most."
)
@click.option("--token-file", type=FILE, default=None, help="File with the token that clients must send.")
@click.option("--tls-cert", type=FILE, default=None, help="Certificate chain, PEM.")
@click.option("--tls-key", type=FILE, default=None, help="Its private key, PEM.")
def command(**options: Any) -> None:
    """Serve the trajectory API of Atropos: environments post groups, a trainer fetches batches."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    import asyncio

    asyncio.run(_run(**options))


async def _run(
    *,
    host: str,
    port: int,
    reload: bool,
    state: str,
    run: str,
    cap: int,
    cap_bytes: int,
    hold: float,
    patience: float,
    repeat_window: float,
    silence: float,
    max_body: int,
    max_plain: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
) -> None:
    from tinker_atropos.errors import ConfigError
    from tinker_atropos.state import open_state

    from tinker_atropos_atropos.api import ApiSettings
    from tinker_atropos_atropos.serving import read_token, serve, tls_context
    from tinker_atropos_atropos.state_backend import StateBackend

    given = {
        **{"cap-bytes": cap_bytes, "hold": hold, "patience": patience, "repeat-window": repeat_window},
        **{"silence": silence, "max-body": max_body, "max-plain": max_plain},
    }
    for name, value in given.items():
        if not value > 0:
            raise ConfigError(f"--{name} {value}: must be more than 0")
    if reload:
        click.echo("--reload has no effect here: the API is no code under development", err=True)
    settings = ApiSettings(None if token_file is None else read_token(token_file), max_body, max_plain, hold)
    tls = tls_context(tls_cert, tls_key)
    if cap < 1:
        raise ConfigError(f"--cap {cap}: the API must hold at least one group")
    # What is kept is gzip already.
    opened = await open_state(state, run, cap, say=lambda line: click.echo(line, err=True), compress="none")
    backend = StateBackend(opened, cap_bytes=cap_bytes, patience=patience, repeat_window=repeat_window, silence=silence)
    if state == "memory":
        click.echo("groups wait in memory: they end with this process", err=True)
    await serve(backend, settings, host=host, port=port, tls=tls, say=_say)


def _say(line: str) -> None:
    print(line, flush=True)
