"""Environment plugin `atropos`: runs foreign Atropos scripts unchanged, or takes groups from an API elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos.environment import EnvironmentSpec
    from tinker_atropos.external import ExternalEnvironment

    from tinker_atropos_atropos.script_config import AtroposConfig


@hookimpl
def environment_spec() -> EnvironmentSpec:
    """Describe the environment; what runs scripts is imported when it is made."""
    from tinker_atropos.environment import EnvironmentSpec

    from tinker_atropos_atropos.script_config import AtroposConfig

    return EnvironmentSpec(
        name="atropos",
        make=make,
        kind="external",
        config=AtroposConfig,
        reference=read_references,
        description="Atropos scripts, unchanged: --env atropos:path/to/script.py[=weight]",
    )


def read_references(texts: Sequence[str]) -> Mapping[str, Any]:
    """Return the settings that `--env atropos:PATH[=WEIGHT]`, once or several times, stands for."""
    from tinker_atropos_atropos.script_config import parse_reference

    return {"scripts": [parse_reference(text) for text in texts]}


def make(config: AtroposConfig) -> ExternalEnvironment:
    """Return the environment: with scripts, or with an API elsewhere. Raises `ConfigError` where it can't be."""
    from tinker_atropos.errors import ConfigError

    if config.api_url is not None:
        if config.scripts:
            raise ConfigError(
                "env.api_url: with it groups come from an API elsewhere and no script is started; give scripts or "
                "api_url, not both"
            )
        from tinker_atropos_atropos.script_remote import RemoteEnvironment

        return RemoteEnvironment(config)
    if not config.scripts:
        raise ConfigError(
            "env.scripts: which Atropos script? Say --env atropos:path/to/script.py, several times for several, or "
            "--set env.api_url=http://127.0.0.1:8000 to take groups from an API that runs"
        )
    from tinker_atropos_atropos.script_run import ScriptEnvironment

    return ScriptEnvironment(config)
