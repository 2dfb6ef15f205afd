"""`TinkerAtroposConfig` of the original tinker-atropos: its sections, properties, `from_yaml` and `to_dict`.

Two things differ, both to keep a run honest: a key that nothing reads is refused rather than dropped (an environment's
own keys in `env` are kept), and the flat names (`lora_rank`, `num_steps`, …) may be given and set, not only read.
"""

from __future__ import annotations

import os
import random
import string
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from tinker_atropos.errors import ConfigError, near
from tinker_atropos.yaml_file import read_yaml

from tinker_atropos_atropos.script_variables import CONFIG_VARIABLE

DEFAULT_MODEL = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_INFERENCE = "http://localhost:8001"

FLAT: Mapping[str, tuple[str, str]] = {
    "base_model": ("env", "tokenizer_name"),
    "atropos_api_url": ("env", "rollout_server_url"),
    "group_size": ("env", "group_size"),
    "batch_size": ("env", "batch_size"),
    "max_batches_offpolicy": ("env", "max_batches_offpolicy"),
    "use_wandb": ("env", "use_wandb"),
    "num_steps": ("env", "total_steps"),
    "steps_per_eval": ("env", "steps_per_eval"),
    "max_token_env_length": ("env", "max_token_length"),
    "max_num_workers": ("env", "max_num_workers"),
    "ensure_scores_are_not_same": ("env", "ensure_scores_are_not_same"),
    "wandb_run_name": ("tinker", "wandb_run_name"),
    "wandb_project": ("tinker", "wandb_project"),
    "wandb_group": ("tinker", "wandb_group"),
    "wandb_run_suffix": ("tinker", "wandb_run_suffix"),
    "lora_rank": ("tinker", "lora_rank"),
    "learning_rate": ("tinker", "learning_rate"),
    "max_token_trainer_length": ("tinker", "max_token_trainer_length"),
    "checkpoint_dir": ("tinker", "checkpoint_dir"),
    "save_checkpoint_interval": ("tinker", "save_checkpoint_interval"),
}
"""The original's flat names, and the section and key that each stands for."""


def generate_run_suffix() -> str:
    """Return four random letters or digits, which tell runs of one name apart."""
    return "".join(random.choices(string.ascii_lowercase + string.digits, k=4))


class EnvConfig(BaseModel):
    """The section `env`. The environment's own keys stand beside these, and are the environment's to check."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), validate_assignment=True)

    group_size: int = Field(16, ge=1)
    batch_size: int = Field(128, ge=1)
    max_batches_offpolicy: int = Field(3, ge=0)
    tokenizer_name: str = Field(DEFAULT_MODEL, min_length=1)
    use_wandb: bool = True
    rollout_server_url: str = "http://localhost:8000"
    wandb_name: str | None = "atropos-tinker-env"
    ensure_scores_are_not_same: bool = False
    max_token_length: int = Field(256, ge=1)
    max_num_workers: int = 24
    total_steps: int = Field(50, ge=1)
    steps_per_eval: int = 100


class OpenAIServerConfig(BaseModel):
    """One entry of the section `openai`, with whatever else Atropos reads there."""

    model_config = ConfigDict(extra="allow", protected_namespaces=(), validate_assignment=True)

    model_name: str
    base_url: str
    api_key: str = "x"
    weight: float = 1.0
    num_requests_for_eval: int = 256
    server_type: str = "sglang"


class TinkerConfig(BaseModel):
    """The section `tinker`. `save_checkpoint_interval` is 0 in the original, whose API forgets what it gave out; here
    trained groups fill the API until a checkpoint."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), validate_assignment=True)

    lora_rank: int = Field(32, ge=1)
    learning_rate: float = Field(4e-5, ge=0, allow_inf_nan=False)
    max_token_trainer_length: int = Field(2048, ge=2)
    checkpoint_dir: str = Field("./temp/", min_length=1)
    save_checkpoint_interval: int = Field(10, ge=0)
    wandb_project: str = "atropos-tinker"
    wandb_group: str | None = None
    wandb_run_name: str = "atropos-tinker-run"
    wandb_run_suffix: str = Field(default_factory=generate_run_suffix)
    tool_call_parser: str = "hermes"


class TinkerAtroposConfig(BaseModel):
    """The whole configuration. Sections of this project's own (`run`, `rollout`, …) may stand beside the original's."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    env: EnvConfig = Field(default_factory=EnvConfig)
    openai: list[OpenAIServerConfig] = Field(
        default_factory=lambda: [OpenAIServerConfig(model_name=DEFAULT_MODEL, base_url=f"{DEFAULT_INFERENCE}/v1")]
    )
    tinker: TinkerConfig = Field(default_factory=TinkerConfig)
    slurm: bool = False
    testing: bool = False

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, given: Any) -> Any:
        """Put flat names into their sections; refuse names that nothing reads."""
        if not isinstance(given, Mapping):
            return given
        sections = {key: value for key, value in given.items() if key not in FLAT}
        for name in given.keys() & FLAT.keys():
            section, key = FLAT[name]
            inner = sections.get(section) or {}
            inner = inner.model_dump() if isinstance(inner, BaseModel) else dict(inner)
            if key in inner and inner[key] != given[name]:
                raise ValueError(f"{name} and {section}.{key} are one setting, given twice; keep one")
            sections[section] = {**inner, key: given[name]}
        for name, value in sections.items():
            if name not in cls.model_fields and not isinstance(value, Mapping):
                raise ValueError(f"{name}: unknown key.{near(str(name), [*cls.model_fields, *FLAT])}")
        return {name: value for name, value in sections.items() if value is not None}

    @field_validator("openai", mode="before")
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        """Atropos takes one mapping as well as a list of them."""
        return [given] if isinstance(given, Mapping | OpenAIServerConfig) else given

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FLAT:
            section, key = FLAT[name]
            setattr(getattr(self, section), key, value)
        else:
            super().__setattr__(name, value)

    @property
    def base_model(self) -> str:
        """The model that is trained."""
        return self.env.tokenizer_name

    @property
    def atropos_api_url(self) -> str:
        """Where the trajectory API is."""
        return self.env.rollout_server_url

    @property
    def inference_api_url(self) -> str:
        """Where environments sample: the first server's address without its `/v1`."""
        return self.openai[0].base_url.rstrip("/").removesuffix("/v1") if self.openai else DEFAULT_INFERENCE

    @property
    def group_size(self) -> int:
        """Trajectories of a group."""
        return self.env.group_size

    @property
    def batch_size(self) -> int:
        """Trajectories of an optimiser step."""
        return self.env.batch_size

    @property
    def max_batches_offpolicy(self) -> int:
        """Batches that may wait."""
        return self.env.max_batches_offpolicy

    @property
    def use_wandb(self) -> bool:
        """Whether environments log to Weights & Biases."""
        return self.env.use_wandb

    @property
    def num_steps(self) -> int:
        """Optimiser steps."""
        return self.env.total_steps

    @property
    def steps_per_eval(self) -> int:
        """Steps between evaluations by the environment."""
        return self.env.steps_per_eval

    @property
    def max_token_env_length(self) -> int:
        """What the environment takes for its own limit of tokens."""
        return self.env.max_token_length

    @property
    def max_num_workers(self) -> int:
        """Groups that the environment has in flight."""
        return self.env.max_num_workers

    @property
    def ensure_scores_are_not_same(self) -> bool:
        """Whether groups of equal scores are left out."""
        return self.env.ensure_scores_are_not_same

    @property
    def wandb_run_name(self) -> str:
        """The run's name, without its suffix."""
        return self.tinker.wandb_run_name

    @property
    def wandb_project(self) -> str:
        """The project that environments are told."""
        return self.tinker.wandb_project

    @property
    def wandb_group(self) -> str | None:
        """The group that environments are told; None: the run's name."""
        return self.tinker.wandb_group

    @property
    def wandb_run_suffix(self) -> str:
        """What tells runs of one name apart."""
        return self.tinker.wandb_run_suffix

    @property
    def lora_rank(self) -> int:
        """Rank of the LoRA adapter."""
        return self.tinker.lora_rank

    @property
    def learning_rate(self) -> float:
        """Learning rate of AdamW."""
        return self.tinker.learning_rate

    @property
    def max_token_trainer_length(self) -> int:
        """Most tokens of a sequence that is trained on."""
        return self.tinker.max_token_trainer_length

    @property
    def checkpoint_dir(self) -> str:
        """Where environments keep their own checkpoints; where none was given they are told the run's folder."""
        return self.tinker.checkpoint_dir

    @property
    def save_checkpoint_interval(self) -> int:
        """Steps between checkpoints; 0: only at the end."""
        return self.tinker.save_checkpoint_interval

    @property
    def num_requests_for_eval(self) -> int:
        """Requests in flight while an environment evaluates."""
        return self.openai[0].num_requests_for_eval if self.openai else 256

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain values, section by section."""
        return self.model_dump()

    @classmethod
    def from_yaml(cls, yaml_path: str | Path) -> Self:
        """Read a file. Raises `FileNotFoundError`, and `ConfigError` with file, key and what would be right.

        In a script that this project started, a file that is not there is replaced by the configuration that was
        written for the script, which says so.
        """
        path = Path(yaml_path)
        if not path.exists():
            written = os.environ.get(CONFIG_VARIABLE)
            if written is None or not Path(written).exists():
                raise FileNotFoundError(f"Config file not found: {yaml_path}")
            print(f"{yaml_path} does not exist; reading this run's own {written}", file=sys.stderr)
            path = Path(written)
        try:
            return cls(**read_yaml(path))
        except ValidationError as error:
            raise ConfigError("; ".join(_said(path, entry) for entry in error.errors())) from None


def _said(path: Path, entry: Any) -> str:
    where = ".".join(str(part) for part in entry["loc"])
    message = str(entry.get("ctx", {}).get("error", "")) if entry["type"] == "value_error" else ""
    if entry["type"] == "extra_forbidden":
        message = f"unknown key.{near(str(entry['loc'][-1]), TinkerConfig.model_fields)}"
    return f"{path}: {f'{where}: ' if where else ''}{message or entry['msg']}" + (
        "" if message else f", got {entry['input']!r:.60}"
    )
