"""The `atropos` adapter: the trajectory API of Atropos, on a State of ours or inside a run."""

from __future__ import annotations

from typing import Any

from tinker_atropos import AdapterConfig, AdapterSpec, hookimpl


class AtroposConfig(AdapterConfig):
    """How the trajectory API behaves inside a run."""

    trust_inference_logprobs: bool = False


def make(config: AtroposConfig) -> Any:
    """Return the class that puts the trajectory API in front of a run's sink."""
    from tinker_atropos_atropos.sink_backend import SinkBackend

    return SinkBackend


@hookimpl
def adapter_spec() -> AdapterSpec:
    """Describe this adapter."""
    return AdapterSpec(
        name="atropos",
        make=make,
        config=AtroposConfig,
        serves="atropos",
        command=_command,
        description="The trajectory API of Atropos",
    )


def _command() -> Any:
    from tinker_atropos_atropos.cli import command

    return command
