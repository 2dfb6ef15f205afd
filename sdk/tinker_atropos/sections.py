"""The sections every configuration has, with the keys of Atropos and of the original tinker-atropos."""

from __future__ import annotations

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    """A section of the file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class RunSection(Section):
    """What runs, and where it writes."""

    env: str | tuple[str, ...] | None = Field(
        None, description="environment plugin, ./my_env.py:env, or atropos:path/to/env.py[=weight], which may be a list"
    )
    trainer: str | None = Field(None, description="trainer plugin")
    name: str | None = Field(None, description="name of the run folder; default: environment, trainer and time")
    output: Path = Field(Path("runs"), description="folder that holds the run folders")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of task order, episodes, sampling and initial weights")
    deterministic: bool = Field(
        False,
        description="a request's samples form a batch of their own (slower): at max_staleness 0 a seed gives one run",
    )
    state: str = Field(
        "memory",
        description="where groups wait for the trainer: memory, or redis://host:port/0, which outlives this process",
    )
    previews: int = Field(3, ge=0, description="test problems shown before and after training; 0: none")

    @field_validator("state")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        if urlsplit(value).password:
            raise ValueError(
                "a password does not belong into a file; leave it out here and put it into the environment variable "
                "TINKER_ATROPOS_REDIS_PASSWORD"
            )
        return value

    @field_validator("output")
    @classmethod
    def _a_place(cls, value: Path) -> Path:
        if "\0" in str(value) or any(len(part.encode()) > 255 for part in value.parts):
            raise ValueError("that can't name a folder: a part is longer than 255 bytes, or holds a null byte")
        return value.expanduser()


class EnvSection(Section):
    """The keys of Atropos' `env` section. The environment plugin's own keys stand beside them."""

    group_size: int = Field(16, ge=1, description="episodes per task")
    batch_size: int = Field(128, ge=1, description="trajectories per optimiser step, a multiple of group_size")
    total_steps: int = Field(50, ge=1, description="optimiser steps")
    steps_per_eval: int = Field(25, ge=0, description="steps between evaluations; 0: none at all")
    max_batches_offpolicy: int = Field(1, ge=0, description="default of rollout.max_staleness")
    max_token_length: int | None = Field(
        None, ge=2, description="most tokens of an episode; default: the model's context"
    )
    shards: int = Field(
        1, ge=1, description="control: groups of simulations that step while others' actions are chosen"
    )
    max_num_workers: int = Field(-1, ge=-1, description="groups in flight at most; -1: as many as staleness allows")
    ensure_scores_are_not_same: bool = Field(True, description="replace groups whose scores are all equal")
    tokenizer_name: str | None = Field(
        None, min_length=1, description="tokenizer in place of the model's own: hub id or folder"
    )
    rollout_server_url: str | None = Field(
        None, description="Atropos trajectory API; the parts run in one process here"
    )
    use_wandb: bool = Field(False, description="Weights & Biases logging")
    wandb_name: str | None = Field(None, description="Weights & Biases name of the environment")

    @field_validator("max_num_workers")
    @classmethod
    def _some_workers(cls, value: int) -> int:
        if value == 0:
            raise ValueError("with no group in flight nothing is ever sampled; use -1 for as many as staleness allows")
        return value


class OpenAISection(Section):
    """One entry of Atropos' `openai` section."""

    model_name: str | None = Field(None, min_length=1, description="model to train; default: the trainer's")
    base_url: str | None = Field(None, description="inference endpoint; the trainer's own policy is sampled here")
    api_key: str | None = Field(None, description="key of that endpoint")
    weight: float = Field(1.0, description="share of requests among several endpoints")
    num_requests_for_eval: int | None = Field(None, ge=1, description="evaluation episodes in flight at most")
    server_type: str | None = Field(None, description="kind of that endpoint")


class RolloutSection(Section):
    """How episodes are rolled out."""

    adapter: str = Field("managed_server", description="adapter that turns messages into tokens and back")
    max_staleness: int | None = Field(
        None, ge=0, description="optimiser steps a turn may be old when trained on; default: env.max_batches_offpolicy"
    )
    max_filtered_groups: int = Field(64, ge=1, description="equal-score groups in a row after which the run stops")
    max_failed_groups: int = Field(16, ge=1, description="failed groups in a row after which the run stops")
    max_tokens: int | None = Field(
        None, ge=1, description="new tokens per turn; default: the environment's, or the room"
    )
    max_turns: int = Field(64, ge=1, description="turns after which an episode is cut off")
    temperature: float = Field(1.0, ge=0.0, le=100.0, description="sampling temperature; other than 1 is off-policy")
    top_p: float = Field(1.0, gt=0.0, le=1.0, description="nucleus sampling; other than 1 is off-policy")
    top_k: int = Field(-1, ge=-1, description="top-k sampling; other than -1 is off-policy")
    episode_timeout: float = Field(600.0, gt=0, description="seconds for one episode")
    episode_retries: int = Field(1, ge=0, description="further tries of a failed episode")
    min_group_size: int | None = Field(
        None, ge=1, description="complete a group with failed episodes from this size; default: only whole groups"
    )
    context_overflow: Literal["truncate", "drop"] = Field(
        "truncate", description="a prompt without room: truncate ends the episode and keeps it, drop fails it"
    )
    eval_tasks: int = Field(128, ge=1, description="test tasks per evaluation")
    eval_temperature: float = Field(0.0, ge=0.0, le=100.0, description="sampling temperature of evaluations")
    workers: Literal["process", "thread", "inline"] | None = Field(
        None, description="control: where a shard's simulations step; default: inline for one shard, else thread"
    )
    eval_episodes: int = Field(10, ge=1, description="control: whole episodes per evaluation")
    max_broken_episodes: int = Field(
        100, ge=0, description="control: simulations reset for a NaN or infinity after which the run stops"
    )
    show_every: int = Field(5, ge=0, description="steps between real rollouts shown; 0: none")

    @field_validator("top_k")
    @classmethod
    def _some_candidates(cls, value: int) -> int:
        if value == 0:
            raise ValueError("with no candidate nothing can be sampled; use -1 for all")
        return value


class ServicesSection(Section):
    """Roles as services. Empty: all three in this process."""


SECTIONS: dict[str, type[Section]] = {
    "run": RunSection,
    "env": EnvSection,
    "rollout": RolloutSection,
    "services": ServicesSection,
    "openai": OpenAISection,
}
FLAGS = ("slurm", "testing")

# Keys of the original files that nothing here reads, with the reason.
UNUSED = {
    "env.rollout_server_url": "environment and trainer share this process",
    "env.use_wandb": "metrics go to metrics.jsonl",
    "env.wandb_name": "metrics go to metrics.jsonl",
    "openai.base_url": "the trainer's own policy is sampled",
    "openai.api_key": "the trainer's own policy is sampled",
    "openai.weight": "the trainer's own policy is sampled",
    "openai.server_type": "the trainer's own policy is sampled",
    "slurm": "everything runs on this machine",
    "testing": "nothing depends on it",
}
