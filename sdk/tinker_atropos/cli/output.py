"""Tables and JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import click

from tinker_atropos.terminal import one_line

format_option: Callable[[Any], Any] = click.option(
    "--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True, help="Output format."
)


def count(number: int, noun: str) -> str:
    """Return a number and its noun: `1 step`, `2 steps`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def size(number: int | None) -> str | None:
    """Return a number of bytes as people read it."""
    if number is None or number < 1000:
        return None if number is None else f"{number} B"
    value = float(number)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 999.95 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def when(moment: str | None) -> str | None:
    """Return an ISO 8601 time to the minute, in UTC where it names its zone; anything else as it is."""
    if moment is None:
        return None
    try:
        time = datetime.fromisoformat(moment)
    except ValueError:
        return moment
    return f"{time:%Y-%m-%d %H:%M}" if time.tzinfo is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


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
