"""`tinker-atropos serve`: what an installed adapter can serve, by the adapter's own word for it."""

from __future__ import annotations

from typing import Any

import click


class ServeGroup(click.Group):
    """Finds its commands among the installed adapters."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_servers())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        from tinker_atropos.errors import PluginError, near

        servers = _servers()
        if cmd_name not in servers:
            raise PluginError(
                f"nothing installed serves {cmd_name!r}.{near(cmd_name, servers)} "
                f"Can be served: {', '.join(servers) or 'nothing'}. "
                f"For the Tinker API: pip install tinker-atropos-local-tinker"
            )
        made = servers[cmd_name].command()
        assert isinstance(made, click.Command)
        return made


@click.command("serve", cls=ServeGroup)
def command() -> None:
    """Serve one part of the system, as an installed adapter offers it."""


def _servers() -> dict[str, Any]:
    from tinker_atropos.registry import Registry

    registry = Registry()
    return {
        spec.serves: spec
        for plugin, error in registry.status("adapter")
        if not error and (spec := registry.load("adapter", plugin.name)).serves and spec.command is not None
    }
