"""What an evaluation is: environment and how it is asked, from the command line to strict values."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinker_atropos import layers
from tinker_atropos.errors import ConfigError, DataError, PluginError, TinkerAtroposError
from tinker_atropos.registry import Registry, is_file_reference, load_file, normal, read_references, split_reference
from tinker_atropos.sections import SECTIONS, EnvSection, RolloutSection
from tinker_atropos.trajectory import Stop
from tinker_atropos.validation import validate

ROLLOUT_KEYS = frozenset(
    {
        "adapter",
        "context_overflow",
        "episode_retries",
        "episode_timeout",
        "eval_temperature",
        "max_tokens",
        "max_turns",
        "top_k",
        "top_p",
    }
)
"""The keys of section `rollout` that an evaluation reads."""

ENV_KEYS = frozenset({"max_token_length", "tokenizer_name"})
"""The keys of section `env` that an evaluation reads, beside the environment's own."""

PASS_THRESHOLD = 1.0
"""The reward from which an episode counts as passed, where neither user nor environment says one."""


@dataclass(frozen=True, slots=True, eq=False)
class Posed:
    """An environment with its settings, and how its episodes are to be sampled.

    `reference` is what was typed. `file_hash` is the sha256 of an environment file, None for a plugin. `adapter` is the
    adapter's section as written; it matters where we render prompts ourselves.
    """

    reference: str
    spec: Any
    config: Any
    rollout: RolloutSection
    env: EnvSection
    adapter_spec: Any
    adapter: Mapping[str, Any]
    temperature: float
    file_hash: str | None


def pose(
    reference: str, overrides: Sequence[tuple[str, Any, str]], samples: int, *, registry: Registry | None = None
) -> Posed:
    """Resolve ENV and the overrides `(path, value, origin)`.

    Raises `PluginError` for an environment that is unknown or of a kind that is not asked in text, and `ConfigError`
    for a setting that is unknown, wrong, or without effect here.
    """
    registry = registry or Registry()
    spec, referred = _specification(reference, registry)
    _refuse_other_kinds(spec)
    written = [layers.read_overrides(referred), layers.read_overrides(overrides)]
    adapter_name = layers.peek(written, "rollout.adapter")
    adapter_spec = registry.load("adapter", adapter_name or RolloutSection().adapter)
    if not adapter_spec.sessions:
        raise PluginError(
            f"rollout.adapter: {adapter_spec.name!r} opens no text sessions; use rollout.adapter=managed_server"
        )
    owners = [
        layers.Owner(normal(spec.name), spec.config.model_fields, "env"),
        layers.Owner(normal(adapter_spec.name), adapter_spec.config.model_fields),
    ]
    layers.check_sections(written, {"trainer", normal(spec.name), normal(adapter_spec.name)})
    own = _read_here(layers.merge(written, owners), spec, adapter_spec)
    suggested = _suggested(spec, owners)
    rollout_values = {**suggested.get("rollout", {}), **own["rollout"]}
    rollout = validate(RolloutSection, rollout_values, path="rollout")
    temperature = rollout.eval_temperature if "eval_temperature" in rollout_values else float(samples > 1)
    return Posed(
        reference=reference,
        spec=spec,
        config=validate(
            spec.config, {**suggested.get(normal(spec.name), {}), **own[normal(spec.name)]}, path=normal(spec.name)
        ),
        rollout=rollout,
        env=validate(EnvSection, own["env"], path="env"),
        adapter_spec=adapter_spec,
        adapter=own[normal(adapter_spec.name)],
        temperature=temperature,
        file_hash=_file_hash(reference),
    )


def make_environment(posed: Posed) -> Any:
    """Return the environment; raises `DataError` with the cause if it can't be built."""
    try:
        return posed.spec.make(posed.config)
    except TinkerAtroposError:
        raise
    except Exception as error:
        raise DataError(f"environment {posed.spec.name!r} can't be made: {type(error).__name__}: {error}") from error


def split_size(environment: Any, posed: Posed, split: str) -> int | None:
    """Return how many tasks a split has, None for an endless one; raises `DataError` where it has none."""
    name = posed.spec.name
    try:
        size: int | None = environment.tasks(split)
        other = "train" if split == "test" else "test"
        there = f"; it has a split {other!r}" if size == 0 and environment.tasks(other) != 0 else ""
    except TinkerAtroposError:
        raise
    except Exception as error:
        raise DataError(
            f"environment {name!r} can't load its split {split!r}: {type(error).__name__}: {error}"
        ) from error
    if size == 0:
        raise DataError(f"environment {name!r} has no tasks in split {split!r}{there}; choose with --split")
    return size


def most_tokens(environment: Any, posed: Posed) -> int | None:
    """Return how many new tokens a turn may have: what the user set, else what the environment suggests."""
    given = posed.rollout.max_tokens
    suggested: int | None = getattr(environment, "max_tokens", None)
    return suggested if given is None else given


def stops(environment: Any, posed: Posed) -> Stop:
    """Return where a turn ends."""
    stop: Stop = getattr(environment, "stop", posed.spec.stop)
    return stop


def pass_threshold(environment: Any, given: float | None) -> float:
    """Return the reward from which an episode counts as passed."""
    return float(getattr(environment, "pass_threshold", PASS_THRESHOLD)) if given is None else given


def identity(
    environment: Any, posed: Posed, model: Mapping[str, Any], *, split: str, tasks: int, samples: int, seed: int
) -> dict[str, Any]:
    """Return, JSON-ready, all that decides what is asked and how: two evaluations with equal ones are the same.

    `model` is the subject's own part. Speed, retries and the pass threshold are not in it.
    """
    stop = stops(environment, posed)
    return {
        "environment": {
            "name": posed.reference if posed.file_hash is not None else posed.spec.name,
            "reference": posed.reference,
            "file_sha256": posed.file_hash,
            "settings": posed.config.model_dump(mode="json"),
        },
        "model": dict(model),
        "split": split,
        "tasks": tasks,
        "samples": samples,
        "seed": seed,
        "sampling": {
            "temperature": posed.temperature,
            "top_p": posed.rollout.top_p,
            "top_k": posed.rollout.top_k,
            "max_tokens": most_tokens(environment, posed),
            "max_turns": posed.rollout.max_turns,
            "stop": list(stop) if isinstance(stop, list | tuple) else stop,
        },
    }


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that tell settings apart."""
    text = json.dumps(settings, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[tuple[str, Any, Any]]:
    """Return the paths at which two settings differ, with both values."""
    found: list[tuple[str, Any, Any]] = []
    for key in sorted({*old, *new}):
        where = f"{path}.{key}" if path else key
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, where)
        elif before != after:
            found.append((where, before, after))
    return found


def _specification(reference: str, registry: Registry) -> tuple[Any, list[tuple[str, Any, str]]]:
    if is_file_reference(reference):
        return registry.add("env", load_file(reference)), []
    plugin, rest = split_reference(reference)
    spec = registry.load("env", plugin)
    return spec, [(f"env.{key}", value, reference) for key, value in read_references(spec, [rest]).items()]


def _refuse_other_kinds(spec: Any) -> None:
    if spec.kind == "control":
        raise PluginError(
            f"environment {spec.name!r} is of kind 'control', whose policies answer no text: its runs are evaluated "
            "while they train (env.steps_per_eval, rollout.eval_episodes) and at their end; evaluations/ in the run's "
            "folder has every one, and metrics.jsonl has eval/return"
        )
    if spec.kind != "text":
        raise PluginError(
            f"environment {spec.name!r} drives itself, so its episodes can't be asked for one by one; it evaluates "
            "within `run`; `eval` takes environments of kind 'text' (see `env list`)"
        )


def _read_here(merged: layers.Layers, spec: Any, adapter_spec: Any) -> dict[str, dict[str, Any]]:
    """Return what was written by section; raises `ConfigError` for what has no effect in an evaluation."""
    read: dict[str, dict[str, Any]] = {
        name: {} for name in ("env", "rollout", normal(spec.name), normal(adapter_spec.name))
    }
    allowed = {"env": ENV_KEYS, "rollout": ROLLOUT_KEYS}
    for path, given in merged.values.items():
        section, _, key = path.partition(".")
        if section not in read or key not in allowed.get(section, (key,)):
            hint = "; for the temperature say --temperature" if path == "rollout.temperature" else "; leave it out"
            known = ", ".join(f"{name}.{key}" for name, keys in sorted(allowed.items()) for key in sorted(keys))
            raise ConfigError(
                f"{given.origin}: {path} has no effect in an evaluation{hint}. It reads env.* of the environment's own "
                f"settings, {normal(adapter_spec.name)}.*, {known}"
            )
        read[section][key] = given.value
    return read


def _suggested(spec: Any, owners: Sequence[layers.Owner]) -> dict[str, dict[str, Any]]:
    """Return the environment's own defaults for what an evaluation reads, by section."""
    found: dict[str, dict[str, Any]] = {}
    own = normal(spec.name)
    fitting = [
        (path, value, f"suits {spec.name}")
        for path, value in spec.defaults.items()
        if normal(path.partition(".")[0]) in {own, *SECTIONS}
    ]
    for path, given in layers.merge([layers.read_overrides(fitting)], owners).values.items():
        section, _, key = path.partition(".")
        if section == own or (section == "rollout" and key in ROLLOUT_KEYS):
            found.setdefault(section, {})[key] = given.value
    return found


def _file_hash(reference: str) -> str | None:
    if not is_file_reference(reference):
        return None
    path = Path(reference if reference.endswith(".py") else reference.rpartition(":")[0]).expanduser()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
