"""What a user sets for foreign Atropos scripts (section `atropos`). Light to import; starts and reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from tinker_atropos.environment import EnvironmentConfig
from tinker_atropos.errors import ConfigError

ServerType: TypeAlias = Literal["sglang", "vllm", "openai"]

TOKEN_VARIABLE = "TINKER_ATROPOS_API_TOKEN"
"""Holds the API's bearer token, where it asks for one; a secret does not belong into a configuration file."""

# Flags of Atropos' own command line that would undo what joins a script to its run, with the reason.
TAKEN_FLAGS = {
    "config": "the configuration is written for the script; put a file of its own into `config`",
    "slurm": "everything runs on this machine",
    "testing": "it would replace the policy by a stub",
    "openai": "Atropos refuses it beside two servers, and two are what makes it use this run's policy at all",
    "env.rollout_server_url": "groups must reach this run",
    "env.tokenizer_name": "tokens must be the policy's",
    "env.use_wandb": "metrics go to metrics.jsonl",
    "env.total_steps": "the run says when it is over; use --steps",
    "env.batch_size": "it is the run's; use --batch-size",
}


class Script(BaseModel):
    """One Atropos script. What is None here is taken from the settings that all scripts share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: Path = Field(description="the Atropos script, run as `python PATH serve`")
    weight: float = Field(1.0, gt=0, allow_inf_nan=False, description="its share of the groups in flight")
    name: str | None = Field(None, min_length=1, description="what it is called in metrics and logs; default: the file")
    config: Path | None = Field(None, description="YAML file of the script's own, with Atropos' sections")
    args: tuple[str, ...] = Field((), description="further arguments after `serve`; they go before any file")
    python: str | None = Field(None, min_length=1, description="interpreter in place of the shared one")
    cwd: Path | None = Field(None, description="folder it runs in, in place of the shared one")
    server_type: ServerType | None = Field(None, description="dialect it samples in, in place of the shared one")
    min_allocation: float | None = Field(
        None,
        ge=0,
        le=1,
        allow_inf_nan=False,
        description="the script's own min_batch_allocation, by which it steers what is in flight; shapes no batch",
    )

    @field_validator("args")
    @classmethod
    def _no_taken_flags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return refuse_taken(value)


class AtroposConfig(EnvironmentConfig):
    """Settings of the environment `atropos`: scripts to run, or the address of an API that others post to."""

    scripts: tuple[Script, ...] = Field((), description="Atropos scripts; --env atropos:PATH[=WEIGHT] adds one")
    python: str | None = Field(
        None, min_length=1, description="interpreter of the scripts, with atroposlib; default: this one"
    )
    args: tuple[str, ...] = Field((), description="arguments for every script, such as --env.max_eval_workers 4")
    cwd: Path | None = Field(None, description="folder that the scripts run in; default: the current one")
    server_type: ServerType = Field(
        "sglang", description="dialect that scripts sample in; sglang and vllm hand them exact tokens, openai text"
    )
    include_messages: bool = Field(True, description="let scripts send messages beside tokens, for the records")
    api_url: str | None = Field(
        None, description="take groups from the trajectory API at this address in place of starting scripts"
    )
    wandb_project: str = Field("tinker-atropos", description="project that environments are told, for their own logs")
    wandb_group: str | None = Field(None, description="group that they are told; default: the run's name")
    checkpoint_dir: Path | None = Field(
        None,
        description="with api_url, folder that environments are told for their own checkpoints; default: the run's",
    )
    api_host: str = Field("127.0.0.1", description="where the scripts' trajectory API listens")
    api_port: int = Field(0, ge=0, le=65535, description="its port; 0: a free one")
    endpoint_port: int | None = Field(
        None, ge=0, le=65535, description="port of the inference endpoints; default: a free one, with api_url 8001"
    )
    startup_timeout: float = Field(
        900.0, gt=0, allow_inf_nan=False, description="seconds for a script to register, then to post its first group"
    )
    idle_timeout: float = Field(
        1800.0,
        gt=0,
        allow_inf_nan=False,
        description="seconds without a group, while the trainer waits, that end a run",
    )
    stop_timeout: float = Field(
        10.0, gt=0, allow_inf_nan=False, description="seconds from SIGTERM to SIGKILL when a script is ended"
    )
    log_lines: int = Field(20, ge=1, le=1000, description="lines of a script's log that an error shows")

    @field_validator("args")
    @classmethod
    def _no_taken_flags(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return refuse_taken(value)

    @field_validator("api_url")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else check_address(value)

    @model_validator(mode="after")
    def _allocations_fit(self) -> Self:
        total = sum(script.min_allocation or 0.0 for script in self.scripts)
        if total > 1.0 + 1e-9:
            raise ValueError(f"the scripts' min_allocation sum up to {total:g}; a batch has no more than 1 to give")
        return self


def check_address(value: str) -> str:
    """Return the address of a trajectory API without a last `/`; raises ValueError, which shows no secret."""
    try:
        parts = urlsplit(value)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if "@" in value:  # also where it can't be read as an address
        raise ValueError(
            "a token does not belong into an address, which is shown and written down; leave out what is before the "
            f"'@' and put the token into the environment variable {TOKEN_VARIABLE}"
        )
    if not sound:
        raise ValueError("expected an address such as http://127.0.0.1:8000")
    return value.rstrip("/")


def without_secret(address: str) -> str:
    """Return an address as it may be shown: what stands before an `@` is left out."""
    scheme, slashes, rest = address.rpartition("://")
    return f"{scheme}{slashes}…@{rest.rpartition('@')[2]}" if "@" in rest else address


def refuse_taken(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Return script arguments as they are; raises ValueError for one that would cut the script off from its run."""
    for word in arguments:
        flag = word.lstrip("-").partition("=")[0] if word.startswith("-") else ""
        taken = next((name for name in TAKEN_FLAGS if flag == name or flag.startswith(f"{name}.")), None)
        if taken is not None:
            raise ValueError(f"{word!r} can't be given to a script: {TAKEN_FLAGS[taken]}")
    return arguments


def parse_reference(text: str) -> dict[str, object]:
    """Return the entry of `scripts` that `PATH[=WEIGHT]` means, as in `--env atropos:math_server.py=2`.

    A path may hold `=`: only a number after the last one is a weight. Raises `ConfigError`.
    """
    path, equals, weight = text.rpartition("=")
    if not equals or path.endswith((".py=", "=")) or weight.endswith(".py"):
        path, weight = text, ""
    if not path:
        raise ConfigError(
            "--env atropos: expected atropos:PATH or atropos:PATH=WEIGHT, such as atropos:math_server.py=2"
        )
    if not weight:
        if text.endswith("="):
            raise ConfigError(f"--env atropos:{text}: a weight is missing after '='")
        return {"path": path}
    try:
        number = float(weight)
    except ValueError:
        raise ConfigError(f"--env atropos:{text}: the weight {weight!r} is no number; say atropos:{path}=2") from None
    return {"path": path, "weight": number}


def script_names(scripts: tuple[Script, ...]) -> list[str]:
    """Return one name for each script, no two alike: its own, else its file's; `-2`, `-3` where one comes again.

    They name files as well, so what a file's name can't have becomes `_`.
    """
    names: list[str] = []
    for script in scripts:
        wanted = "".join(
            letter if letter.isalnum() or letter in "-_." else "_" for letter in script.name or script.path.stem
        ).lstrip(".")[:80]
        wanted = wanted or "script"
        name, count = wanted, 1
        while name in names:
            count += 1
            name = f"{wanted}-{count}"
        names.append(name)
    return names
