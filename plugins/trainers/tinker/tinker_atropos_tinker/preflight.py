"""What can be said about a run before anything heavy is imported or anything is spent."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tinker_atropos.errors import ConfigError, MissingCredentials
from tinker_atropos.trainer import Quote

from tinker_atropos_tinker.config import TinkerConfig, is_loopback
from tinker_atropos_tinker.learning_rate import learning_rate
from tinker_atropos_tinker.local import check_local_model

HOSTED_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
LOCAL_MODEL = "smollm2-135m"
HOSTED_URL_VARIABLE = "TINKER_BASE_URL"

_NO_EFFECT = {
    "checkpoint_dir": "checkpoints are kept by the Tinker service, with --local in the run folder",
    "wandb_project": "Weights & Biases logging is not built yet",
    "wandb_group": "Weights & Biases logging is not built yet",
    "wandb_run_name": "Weights & Biases logging is not built yet",
    "wandb_run_suffix": "Weights & Biases logging is not built yet",
    "tool_call_parser": "tool calls are not parsed yet",
}


def default_model(config: TinkerConfig) -> str:
    """Return the model that is trained where the user names none."""
    return LOCAL_MODEL if config.local else HOSTED_MODEL


def endpoint(config: TinkerConfig) -> str | None:
    """Return the configured address of the API, None for the hosted one or a server that is yet to start."""
    if config.local:
        return None
    return config.base_url or (os.environ.get(HOSTED_URL_VARIABLE) or "").rstrip("/") or None


def check(config: TinkerConfig, model: str | None) -> None:
    """Raise what can't work here: a missing or wrong key, an absent adapter, an unknown model, no learning rate."""
    if config.local:
        check_local_model(model or LOCAL_MODEL)
        return
    check_key(config)
    learning_rate(config, model or default_model(config))


def check_key(config: TinkerConfig) -> None:
    """Raise `ConfigError` unless the SDK will find a key, or needs none because the server is this machine's."""
    key = os.environ.get("TINKER_API_KEY", "")
    if os.environ.get("TINKER_CREDENTIAL_CMD"):
        return
    if key:
        if not key.startswith(("tml-", "eyJ")):  # the SDK takes a JWT as well
            raise ConfigError(
                f"TINKER_API_KEY begins with {key[:4]!r}…; a Tinker key begins with 'tml-'. Copy it again from the "
                "Tinker console, or train on this machine with --local"
            )
        return
    if has_stored_key():
        return
    url = endpoint(config)
    if url is not None and is_loopback(url):
        return
    raise MissingCredentials(
        "no Tinker API key: export TINKER_API_KEY=tml-… for the hosted service, or add --local to train on this "
        "machine with neither a key nor a network"
    )


def has_stored_key() -> bool:
    """Whether `tinker auth login` left a key. Reads the SDK's file, since importing the SDK takes seconds."""
    try:
        stored = json.loads(Path("~/.tinker/credentials.json").expanduser().read_text(encoding="utf-8"))
        return stored.get("default") in stored.get("keys", {})
    except (OSError, ValueError, AttributeError, TypeError, RuntimeError):
        return False


def quote(config: TinkerConfig, model: str | None) -> Quote:
    """Return what a run would use."""
    name = model or default_model(config)
    url = endpoint(config)
    hosted = not config.local and (url is None or not is_loopback(url))
    where = "this machine" if config.local else url or "the hosted Tinker service"
    kept = "kept until deleted" if config.checkpoint_ttl_seconds is None else f"{config.checkpoint_ttl_seconds} s"
    lines = (
        f"where           {where}",
        f"model           {name}",
        f"LoRA rank       {config.lora_rank}",
        f"learning rate   {learning_rate(config, name):.3g}",
    )
    return Quote(hosted, (*lines, f"checkpoints     {kept}") if hosted else lines)


def unused(config: TinkerConfig) -> Mapping[str, str]:
    """Return the keys that were set and have no effect, each with its reason."""
    idle = {key: reason for key, reason in _NO_EFFECT.items() if getattr(config, key) is not None}
    if not config.local:
        idle["run.deterministic"] = "the service decides what it samples together; --local has a deterministic mode"
    return idle
