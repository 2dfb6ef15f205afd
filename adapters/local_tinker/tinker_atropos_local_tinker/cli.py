"""The command `tinker-atropos serve tinker`, also run as `python -m tinker_atropos_local_tinker`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tinker_atropos.errors import TinkerAtroposError

from tinker_atropos_local_tinker.serving import DEFAULT_MODEL, DEFAULT_PORT, log_to_stderr, serve


@click.command(name="tinker")
@click.option("--model", default=DEFAULT_MODEL, show_default=True, help="A model's name, hub id or local folder.")
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    default=Path("tinker-store"),
    show_default=True,
    help="Folder of checkpoints and journal.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Loopback address to listen on.")
@click.option("--port", type=int, default=DEFAULT_PORT, show_default=True, help="Port; 0 takes a free one.")
@click.option("--deterministic", is_flag=True, help="One seed, one result, whatever runs beside it (slower).")
@click.option("--threads", type=int, default=None, help="Threads that compute; all cores if left out.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--dtype", default="float32", show_default=True, help="Type of the base model's weights.")
@click.option("--parent-pipe", type=int, default=None, hidden=True)
def command(**options: Any) -> None:
    """Serve the Tinker API from this machine over a local engine."""
    log_to_stderr()
    try:
        serve(say=_say, **options)
    except TinkerAtroposError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


def _say(line: str) -> None:
    print(line, flush=True)
