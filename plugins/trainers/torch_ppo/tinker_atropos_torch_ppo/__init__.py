"""Trainer plugin `torch_ppo`: PPO in plain torch for continuous and discrete control, on this machine."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from tinker_atropos.control import ControlPolicy, ControlTrainer
    from tinker_atropos.trainer import CheckpointCatalogue, Quote, TrainerSpec
    from tinker_atropos.trajectory import PolicyRef

    from tinker_atropos_torch_ppo.config import TorchPPOConfig


@hookimpl
def trainer_spec() -> TrainerSpec:
    """Describe the trainer; torch is not imported here."""
    from tinker_atropos.trainer import TrainerSpec

    from tinker_atropos_torch_ppo.config import TorchPPOConfig, unused

    return TrainerSpec(
        name="torch_ppo",
        make=_make,
        open_policy=_open_policy,
        kinds=frozenset({"control"}),
        config=TorchPPOConfig,
        check=_check,
        quote=_quote,
        unused=unused,
        checkpoints=_checkpoints,
        has_account=False,
        description="PPO in plain torch for continuous and discrete control, on this machine",
    )


def _make(config: TorchPPOConfig) -> ControlTrainer:
    from tinker_atropos_torch_ppo.trainer import TorchPPOTrainer

    return TorchPPOTrainer(config)


async def _open_policy(ref: PolicyRef, config: TorchPPOConfig) -> ControlPolicy:
    from tinker_atropos_torch_ppo.inference import NumpyPolicy, open_snapshot

    return NumpyPolicy(ref, open_snapshot(ref.uri))


async def _checkpoints(config: TorchPPOConfig, folder: Path | None) -> CheckpointCatalogue:
    from tinker_atropos_torch_ppo.catalogue import open_catalogue

    return await open_catalogue(config, folder)


def _check(config: TorchPPOConfig, model: str | None) -> None:
    """Raise what can't work here, before torch is imported."""
    from tinker_atropos.errors import ConfigError

    if model is not None:
        raise ConfigError(
            f"model {model!r}: torch_ppo makes its own networks; leave --model out and set torch_ppo.hidden_sizes"
        )
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("torch_ppo needs torch, which is not installed; pip install tinker-atropos-torch-ppo")


def _quote(config: TorchPPOConfig, model: str | None) -> Quote:
    from tinker_atropos.trainer import Quote

    length = "until --steps" if config.total_env_steps is None else f"{config.total_env_steps:,} environment steps"
    return Quote(hosted=False, lines=(f"PPO on this machine ({config.device}), {length}; costs nothing",))
