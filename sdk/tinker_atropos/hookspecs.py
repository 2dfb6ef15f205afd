"""The pluggy hooks: what a plugin module may implement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from tinker_atropos.adapter import AdapterSpec
    from tinker_atropos.environment import EnvironmentSpec
    from tinker_atropos.trainer import TrainerSpec
    from tinker_atropos.trajectory import Group

PROJECT = "tinker_atropos"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hooks:
    """Every hook. One module implements one of the first three; the others are for listeners."""

    @hookspec
    def environment_spec(self) -> EnvironmentSpec:
        """Return the environment this module offers (entry-point group `tinker_atropos.envs`)."""
        raise NotImplementedError

    @hookspec
    def trainer_spec(self) -> TrainerSpec:
        """Return the trainer this module offers (entry-point group `tinker_atropos.trainers`)."""
        raise NotImplementedError

    @hookspec
    def adapter_spec(self) -> AdapterSpec:
        """Return the adapter this module offers (entry-point group `tinker_atropos.adapters`)."""
        raise NotImplementedError

    @hookspec
    def on_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after each step with what was written to `metrics.jsonl`."""

    @hookspec
    def on_group(self, group: Group) -> None:
        """Called for each group that enters the state, before it is trained on."""

    @hookspec
    def on_checkpoint(self, manifest: Mapping[str, Any]) -> None:
        """Called after a run checkpoint's manifest was written."""
