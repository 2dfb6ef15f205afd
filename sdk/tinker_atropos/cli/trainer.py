"""`tinker-atropos trainer`: which trainers are installed, and what one accepts."""

from __future__ import annotations

import click

from tinker_atropos.cli.env import plugin_rows, setting_rows
from tinker_atropos.cli.output import format_option, show


@click.group("trainer")
def command() -> None:
    """Trainers that are installed."""


@command.command("list")
@format_option
def list_(form: str) -> None:
    """List trainers; a broken one is named with its cause."""
    from tinker_atropos.registry import Registry

    show(
        plugin_rows(Registry(), "trainer"),
        form,
        empty="no trainers are installed; try pip install tinker-atropos-tinker",
    )


@command.command("info")
@click.argument("name")
@format_option
def info(name: str, form: str) -> None:
    """Show what a trainer learns and accepts.

    Each setting is given as `--set trainer.KEY=VALUE`, or in the `trainer` section of a file.
    """
    from tinker_atropos.registry import Registry, normal

    spec = Registry().load("trainer", name)
    rows = setting_rows(spec.config, "trainer")
    if form == "json":
        show(
            [{"name": spec.name, "kinds": sorted(spec.kinds), "can": sorted(spec.can), "settings": rows}],
            form,
            empty="",
        )
        return
    click.echo(f"{spec.name}: {spec.description or 'no description'}")
    click.echo(f"learns {', '.join(sorted(spec.kinds))}; can {', '.join(sorted(spec.can)) or 'nothing special'}")
    show(rows, form, empty="it has no settings of its own")
    if rows:
        click.echo(f"trainer.KEY and {normal(spec.name)}.KEY are one setting, on the command line and in a file")
