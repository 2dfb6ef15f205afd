"""What a user may set for the Tinker trainer (section `tinker`). Light to import."""

from __future__ import annotations

import ipaddress
from typing import Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator
from tinker_atropos.advantages import Estimator
from tinker_atropos.trainer import TrainerConfig

LOSSES = ("importance_sampling",)
"""The losses that this trainer implements. Each needs its datum fields in `datums.py`; ppo, cispo and dro come next."""


class TinkerConfig(TrainerConfig):
    """Settings of the Tinker trainer."""

    lora_rank: int = Field(32, ge=1, le=512, description="LoRA rank")
    learning_rate: float | None = Field(
        None, ge=0, allow_inf_nan=False, description="AdamW learning rate; unset: by the model's family and size"
    )
    max_token_trainer_length: int | None = Field(
        None, ge=2, description="longest segment in tokens that is trained on; longer ones are left out and counted"
    )
    checkpoint_dir: str | None = Field(None, description="no effect: checkpoints are kept by the Tinker service")
    wandb_project: str | None = Field(None, description="no effect yet")
    wandb_group: str | None = Field(None, description="no effect yet")
    wandb_run_name: str | None = Field(None, description="no effect yet")
    wandb_run_suffix: str | None = Field(None, description="no effect yet")
    tool_call_parser: str | None = Field(None, description="no effect yet")

    local: bool = Field(False, description="serve the Tinker API from this machine; needs no key and no network")
    local_threads: int | None = Field(None, ge=1, le=1024, description="threads of the local server; unset: its choice")
    base_url: str | None = Field(
        None, description="where the Tinker API is; unset: $TINKER_BASE_URL, else the hosted one"
    )

    loss: str = Field("importance_sampling", description="policy loss: importance_sampling")
    advantage: Estimator = Field(
        "grpo", description="grpo: minus the group's mean; rloo: minus the others' mean; normalized: over the deviation"
    )
    beta1: float = Field(0.9, ge=0, lt=1, description="AdamW: decay of the gradient's running mean")
    beta2: float = Field(0.95, ge=0, lt=1, description="AdamW: decay of the squared gradient's running mean")
    eps: float = Field(1e-8, gt=0, allow_inf_nan=False, description="AdamW: added to the denominator")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="AdamW: decoupled weight decay")
    grad_clip_norm: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        # Losses here are sums over tokens, with norms of 10 to 10,000. The 1 that is usual with losses that are means
        # would scale every batch to one length, and whatever is sound depends on the batch; so choose by the metric.
        description="largest global gradient norm, by train/grad_norm (losses are sums: 10 to 10,000); 0: none",
    )
    checkpoint_ttl_seconds: int | None = Field(
        None,
        ge=3600,
        le=315_360_000,
        description="seconds until the service deletes a checkpoint, one hour at least; unset: kept",
    )
    logprob_mismatch_warning: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="warn where sampler and trainer disagree by more nats a token than this, on average, in one step",
    )

    @field_validator("loss")
    @classmethod
    def _known_loss(cls, value: str) -> str:
        if value not in LOSSES:
            raise ValueError(f"loss {value!r} is not implemented; implemented: {', '.join(LOSSES)}")
        return value

    @field_validator("base_url")
    @classmethod
    def _safe_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{value!r} is no address; expected https://host or http://127.0.0.1:port")
        if parts.scheme == "http" and not is_loopback(value):
            raise ValueError(f"{value!r} would send the key in clear; use https:// beyond this machine")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.local and self.base_url is not None:
            raise ValueError(f"local=true starts its own server, so base_url={self.base_url!r} can't hold; drop one")
        if self.local_threads is not None and not self.local:
            raise ValueError("local_threads needs local=true (--local)")
        return self


def is_loopback(url: str) -> bool:
    """Whether a URL's host is this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
