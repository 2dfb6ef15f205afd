"""Writes the configuration that joins a foreign script to a run: one that overrides the script's own defaults.

Pure: it starts nothing. Facts of Atropos are those of 296a0bc (atroposlib 0.4.0).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import ConfigError
from tinker_atropos.external import PolicyEndpoint, RunInfo

from tinker_atropos_atropos.script_config import ServerType

NEVER = 1_000_000_000
"""Steps after which a script would end. It counts waiting groups as trained, so the run's own number would end it
while groups are still needed; the run ends its scripts."""


@dataclass(frozen=True, slots=True)
class Joined:
    """One script as it takes part in a run. `share` is its part of the groups in flight, in (0, 1]."""

    name: str
    tokenizer: str
    share: float
    weight: float
    server_type: ServerType
    include_messages: bool
    min_allocation: float | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """A script's configuration, and what a user should hear about it."""

    content: dict[str, Any]
    notes: tuple[str, ...]


def script_configuration(
    script: Joined, endpoint: PolicyEndpoint, info: RunInfo, api_url: str, own: Mapping[str, Any] | None = None
) -> Written:
    """Return the configuration for `python SCRIPT serve --config`.

    `own` is the content of a file of the script's own: it goes before what the run only suggests, and behind what joins
    the script to the run. Raises `ConfigError` where the file is of a wrong shape.
    """
    own = own or {}
    env, servers = _section(own, "env", script.name), _servers(own, script.name)
    notes: list[str] = []
    joined = _joined(script, info, api_url)
    for key, value in joined.items():
        if key in env and env[key] != value and key != "total_steps":  # which every file has
            notes.append(f"{script.name}: env.{key} of its file is {env[key]!r}; this run's {value!r} holds")
    suggested = _suggested(script, info, env, notes)
    content = {
        **{key: value for key, value in own.items() if key not in ("env", "openai", "slurm", "testing")},
        "env": {**suggested, **env, **joined},
        "openai": [_server(script, endpoint, servers) for _ in range(2)],
        "slurm": False,
        "testing": False,
    }
    return Written(content, tuple(notes))


def _joined(script: Joined, info: RunInfo, api_url: str) -> dict[str, Any]:
    """What must hold for the script to take part at all."""
    return {
        "tokenizer_name": script.tokenizer,
        "rollout_server_url": api_url,
        "wandb_name": script.name,  # null is sent as it is, and refused by the API
        "use_wandb": False,
        "batch_size": info.batch_size,
        "total_steps": NEVER,
        # The script would drop groups of equal scores without a word; the run counts them, then drops them.
        "ensure_scores_are_not_same": False,
        "inference_weight": script.weight,
        # None would be the natural word for "none", and some scripts' own configurations refuse it.
        "min_batch_allocation": script.min_allocation or 0.0,
    }


def _suggested(script: Joined, info: RunInfo, env: Mapping[str, Any], notes: list[str]) -> dict[str, Any]:
    """What a file of the script's own may change."""
    size = env.get("group_size", info.group_size)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{script.name}: env.group_size of its file is {size!r}; expected a whole number from 1")
    if size > info.batch_size:
        raise ConfigError(
            f"{script.name}: env.group_size of its file is {size}, more than this run's batch of {info.batch_size} "
            f"trajectories; use {info.batch_size} or less, or a larger --batch-size"
        )
    return {
        "group_size": size,
        "max_token_length": info.max_token_length,
        "steps_per_eval": _steps_per_eval(script, info, notes),
        "max_batches_offpolicy": info.max_staleness + 1,
        "max_num_workers": _workers(script, info, size),
        "include_messages": script.include_messages,
        "min_items_sent_before_logging": 0,
    }


def _steps_per_eval(script: Joined, info: RunInfo, notes: list[str]) -> int:
    """Atropos evaluates where `step % k` falls, which it never does for k = 1."""
    if info.steps_per_eval == 1:
        notes.append(f"{script.name}: env.steps_per_eval 1 never evaluates in Atropos; 2 is written for it")
        return 2
    return info.steps_per_eval


def _workers(script: Joined, info: RunInfo, group_size: int) -> int:
    """Groups in flight: one batch for each step of staleness that is allowed and one more, parted by weight.

    Unbounded it would be eight for every server entry, whose groups grow stale or are cancelled when the queue fills.
    Atropos' own weights bound only how many of 512 requests go out at once, which no small run ever feels.
    """
    groups = math.ceil(info.batch_size / group_size) * (info.max_staleness + 1)
    return max(1, round(groups * script.share))


def _server(script: Joined, endpoint: PolicyEndpoint, servers: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of `openai`. Two alike: with one or none Atropos keeps a script's own address in several cases."""
    kept = {key: value for key, value in servers.items() if key in ("timeout", "num_max_requests_at_once")}
    kept |= {key: value for key, value in servers.items() if key in ("num_requests_for_eval", "server_type")}
    return {
        "server_type": script.server_type,
        "num_requests_for_eval": 64,
        **kept,
        "model_name": endpoint.model,
        "tokenizer_name": script.tokenizer,
        "base_url": endpoint.url,
        "api_key": endpoint.token or "x",  # the client insists on one
        "n_kwarg_is_ignored": False,
        "health_check": False,  # it samples once a second for each entry
    }


def _section(own: Mapping[str, Any], key: str, name: str) -> Mapping[str, Any]:
    found = own.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}: {key} of its file is {found!r:.60}; expected a section of keys")
    return found


def _servers(own: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The first entry of the file's `openai`, whose timeouts and limits may stay."""
    found = own.get("openai")
    first = found[0] if isinstance(found, list) and found else found
    if not first:
        return {}
    if not isinstance(first, Mapping):
        raise ConfigError(f"{name}: openai of its file is {found!r:.60}; expected a mapping of keys, or a list of them")
    if first.get("server_type") not in (None, "sglang", "vllm", "openai"):
        raise ConfigError(
            f"{name}: openai.server_type of its file is {first['server_type']!r}; this run serves sglang, vllm, openai"
        )
    return {key: value for key, value in first.items() if value is not None}
