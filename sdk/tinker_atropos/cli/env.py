"""`tinker-atropos env`: which environments are installed, and what one accepts."""

from __future__ import annotations

from typing import Any

import click

from tinker_atropos.cli.output import format_option, show


@click.group("env")
def command() -> None:
    """Environments that are installed."""


@command.command("list")
@format_option
def list_(form: str) -> None:
    """List environments; a broken one is named with its cause."""
    from tinker_atropos.registry import Registry

    show(
        plugin_rows(Registry(), "env"),
        form,
        empty="no environments are installed; try pip install tinker-atropos-gsm8k",
    )


@command.command("info")
@click.argument("name")
@format_option
def info(name: str, form: str) -> None:
    """Show what an environment is and accepts.

    Each setting is given as `--set env.KEY=VALUE`, or in the `env` section of a file.
    """
    from tinker_atropos.registry import Registry, is_file_reference, load_file, normal

    spec = load_file(name) if is_file_reference(name) else Registry().load("env", name)
    rows = setting_rows(spec.config, "env")
    if form == "json":
        show(
            [{"name": spec.name, "kind": spec.kind, "description": spec.description, "settings": rows}], form, empty=""
        )
        return
    click.echo(f"{spec.name}: {spec.description or 'no description'}")
    click.echo(f"kind {spec.kind}; needs {', '.join(sorted(spec.needs)) or 'nothing special'}; stop {spec.stop!r}")
    show(rows, form, empty="it has no settings of its own")
    if rows:
        click.echo(f"env.KEY and {normal(spec.name)}.KEY are one setting, on the command line and in a file")


def plugin_rows(registry: Any, kind: Any) -> list[dict[str, Any]]:
    """Return a row per installed plugin of a kind."""
    return [
        {
            "name": plugin.name,
            "package": f"{plugin.distribution} {plugin.version}",
            "module": plugin.module,
            "status": f"broken: {error}" if error else "ok",
        }
        for plugin, error in registry.status(kind)
    ]


def setting_rows(config: Any, section: str) -> list[dict[str, Any]]:
    """Return a row per setting of a configuration model."""
    return [
        {
            "setting": f"{section}.{name}",
            "default": "required" if field.is_required() else repr(field.get_default(call_default_factory=True)),
            "meaning": field.description or "",
        }
        for name, field in config.model_fields.items()
    ]
