"""Tables and JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from tinker_atropos.terminal import one_line

format_option: Callable[[Any], Any] = click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)


def show(rows: Sequence[Mapping[str, Any]], form: str, *, empty: str) -> None:
    """Print rows of one shape as an aligned table, or as JSON."""
    if form == "json":
        click.echo(json.dumps([dict(row) for row in rows], indent=1, default=str))
        return
    if not rows:
        click.echo(empty, err=True)
        return
    names = list(rows[0])
    cells = [[name.upper() for name in names]]
    cells += [["-" if row[name] is None else one_line(str(row[name])) for name in names] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    for line in cells:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
