"""What a user may set for the PPO trainer (section `torch_ppo`). Light to import."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from tinker_atropos.trainer import TrainerConfig

Width = Annotated[int, Field(ge=1, le=8192)]


class TorchPPOConfig(TrainerConfig):
    """Settings of PPO. The defaults are CleanRL's for continuous control, but for the value clipping, which is off."""

    total_env_steps: int | None = Field(
        None, ge=1, description="environment steps of the whole run, over all simulations; unset: --steps ends it"
    )
    steps_per_update: int = Field(128, ge=1, le=65536, description="steps that each simulation takes for one update")
    schedule: Literal["sync", "async"] = Field(
        "sync",
        description="sync: collect, then learn, exactly reproducible; async: collection goes on meanwhile",
    )
    correction: Literal["vtrace", "none"] = Field(
        "vtrace", description="async: how steps of an older policy are corrected; none: the clipped ratio alone"
    )

    learning_rate: float = Field(3e-4, gt=0, le=1, description="Adam learning rate, at the beginning if it is annealed")
    anneal: bool = Field(True, description="let the learning rate fall linearly to 0 over total_env_steps")
    gamma: float = Field(0.99, gt=0, le=1, description="discount of a reward one step later")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="lambda of GAE and V-trace: 0 trusts the critic, 1 returns")
    clip_range: float = Field(0.2, gt=0, le=10, description="how far the probability ratio may leave 1")
    value_clip: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="how far a value may move in one update, scaled; unset: any way"
    )
    epochs: int = Field(10, ge=1, le=1000, description="passes over the steps of one update")
    minibatches: int = Field(32, ge=1, le=65536, description="minibatches, and so optimiser steps, in each pass")
    entropy_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of the entropy bonus")
    value_coefficient: float = Field(0.5, ge=0, allow_inf_nan=False, description="weight of the value loss")
    max_grad_norm: float = Field(
        0.5, ge=0, allow_inf_nan=False, description="largest norm of all gradients together; 0: no clipping"
    )
    target_kl: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="end an update after the pass with a mean KL above it; unset: never",
    )
    rpo_alpha: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="RPO: shift a Gaussian's mean by up to this while learning; 0: off",
    )

    normalize_observations: bool = Field(True, description="scale observations by their running mean and deviation")
    normalize_returns: bool = Field(True, description="scale rewards by the running deviation of discounted returns")

    hidden_sizes: tuple[Width, ...] = Field((64, 64), max_length=16, description="widths of the actor's hidden layers")
    value_hidden_sizes: tuple[Width, ...] | None = Field(
        None, max_length=16, description="widths of the critic's hidden layers; unset: as the actor's"
    )
    activation: Literal["tanh", "relu"] = Field("tanh", description="between the layers")
    log_std_init: float = Field(
        0.0, ge=-10, le=5, description="log of the Gaussian's first standard deviation, in the action's own units"
    )

    keep_checkpoints: int = Field(
        5, ge=0, description="newest checkpoints kept on disk, beside the last and what a resumption needs; 0: all"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="where the learner works: auto, cpu, cuda or cuda:N"
    )
    threads: int = Field(
        1,
        ge=1,
        le=1024,
        description="threads of the learner (torch) and of acting (NumPy); another number may change a run's last bits",
    )


def unused(config: TorchPPOConfig) -> dict[str, str]:
    """Return the keys that have no effect with this configuration, with the reason."""
    if config.schedule == "sync":
        return {"correction": "schedule=sync learns from the newest policy only, so there is nothing to correct"}
    return {}
