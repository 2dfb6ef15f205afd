"""Trainer plugin `tinker`: LoRA through the Tinker SDK, on the hosted service or (`--local`) on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from tinker_atropos.trainer import CheckpointCatalogue, StoredPolicy, TextPolicy, Trainer, TrainerSpec
    from tinker_atropos.trajectory import PolicyRef

    from tinker_atropos_tinker.config import TinkerConfig


@hookimpl
def trainer_spec() -> TrainerSpec:
    """Describe the trainer; neither tinker nor transformers is imported here."""
    from tinker_atropos.trainer import TrainerSpec

    from tinker_atropos_tinker import preflight
    from tinker_atropos_tinker.config import TinkerConfig

    return TrainerSpec(
        name="tinker",
        make=_make,
        open_policy=_open_policy,
        kinds=frozenset({"text"}),
        config=TinkerConfig,
        can=frozenset({"token_advantages"}),
        check=preflight.check,
        quote=preflight.quote,
        unused=preflight.unused,
        default_model=preflight.default_model,
        checkpoints=_checkpoints,
        stored=_stored,
        description="LoRA through the Tinker SDK: hosted, or on this machine with --local",
    )


def _make(config: TinkerConfig) -> Trainer:
    from tinker_atropos_tinker.trainer import TinkerTrainer

    return TinkerTrainer(config)


async def _open_policy(ref: PolicyRef, config: TinkerConfig) -> TextPolicy:
    from tinker_atropos_tinker.policy import open_policy

    return await open_policy(ref, config)


async def _checkpoints(config: TinkerConfig, folder: Path | None) -> CheckpointCatalogue:
    from tinker_atropos_tinker.catalogue import open_catalogue

    return await open_catalogue(config, folder)


def _stored(config: TinkerConfig, policy: StoredPolicy) -> AbstractAsyncContextManager[TextPolicy]:
    from tinker_atropos_tinker.stored import open_stored

    return open_stored(config, policy)
