"""YAML file and overrides → strict models, each value with its origin. Knows plugins only by their specifications."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from tinker_atropos.errors import ConfigError, PluginError, near
from tinker_atropos.registry import KINDS, Registry, is_file_reference, load_file, normal
from tinker_atropos.sections import (
    FLAGS,
    SECTIONS,
    UNUSED,
    EnvSection,
    OpenAISection,
    RolloutSection,
    RunSection,
    Section,
    ServicesSection,
)
from tinker_atropos.yaml_file import parse_value, read_yaml

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Given:
    """One value that somebody wrote: where (`file.yaml`, `--steps`), and whether on the command line."""

    value: Any
    origin: str
    override: bool = False


@dataclass(frozen=True)
class Config:
    """A resolved configuration. `environment`, `trainer` and `adapter` are the plugins' own models."""

    run: RunSection
    env: EnvSection
    openai: OpenAISection
    rollout: RolloutSection
    services: ServicesSection
    environment: Any
    trainer: Any
    adapter: Any
    environment_spec: Any
    trainer_spec: Any
    adapter_spec: Any
    origins: Mapping[str, str]
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name."""
        assert self.run.name is not None
        return self.run.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.output / self.name

    @property
    def max_staleness(self) -> int:
        """The hard bound in optimiser steps."""
        given = self.rollout.max_staleness
        return self.env.max_batches_offpolicy if given is None else given

    @property
    def groups_per_batch(self) -> int:
        """Groups per optimiser step."""
        return self.env.batch_size // self.env.group_size

    @property
    def model(self) -> str | None:
        """The model to train: the one named, else the trainer's default, else None."""
        if self.openai.model_name is not None:
            return self.openai.model_name
        default = self.trainer_spec.default_model
        return default(self.trainer) if default is not None else None

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of a file: reading that file again gives this configuration."""
        dump = {"mode": "json"}
        return {
            "run": self.run.model_dump(**dump),  # type: ignore[arg-type]
            "env": self.env.model_dump(**dump),  # type: ignore[arg-type]
            "openai": {**self.openai.model_dump(**dump), "model_name": self.model},  # type: ignore[arg-type]
            "rollout": self.rollout.model_dump(**dump),  # type: ignore[arg-type]
            "services": self.services.model_dump(**dump),  # type: ignore[arg-type]
            normal(self.environment_spec.name): self.environment.model_dump(**dump),
            normal(self.trainer_spec.name): self.trainer.model_dump(**dump),
            normal(self.adapter_spec.name): self.adapter.model_dump(**dump),
        }


def validate(model: type[Model], values: Mapping[str, Any], *, path: str = "") -> Model:
    """Return `model` made of `values`; raises `ConfigError` with path, value, what is right, and the near name."""
    known = list(model.model_fields)
    for key in values:
        if key not in model.model_fields:
            raise ConfigError(
                f"{_join(path, key)}: unknown key.{near(key, known)} Known keys: {', '.join(known) or 'none'}"
            )
    try:
        # Through JSON: strict there refuses `true` for a number and `"8"` for 8, yet takes text for a path.
        return model.model_validate_json(json.dumps(_finite(dict(values), path), default=str), strict=True)
    except ValidationError as error:
        raise ConfigError("; ".join(_problem(path, model, entry) for entry in error.errors())) from None


def _finite(value: Any, path: str) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{path}: got {value}; expected a finite number")
    if isinstance(value, Mapping):
        return {key: _finite(entry, _join(path, str(key))) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry, path) for entry in value]
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
        raise ConfigError(f"{path}: {str(value)[:20]}… is too large a number")
    return value


def _problem(path: str, model: type[BaseModel], entry: Any) -> str:
    where = _join(path, ".".join(str(part) for part in entry["loc"])) or model.__name__
    if entry["type"] == "extra_forbidden":
        return f"{where}: unknown key"
    got = entry["input"]
    shown = repr(got) if len(repr(got)) <= 60 else repr(got)[:57] + "…"
    message = entry["msg"][:1].lower() + entry["msg"][1:]
    return f"{where}: {message}, got {shown} ({type(got).__name__})"


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path and key else path or key


class _Layers:
    """What was written, by path; later layers go before earlier ones."""

    def __init__(self) -> None:
        self.values: dict[str, Given] = {}

    def put(self, path: str, given: Given) -> None:
        self.values[path] = given

    def under(self, section: str) -> dict[str, Given]:
        start = section + "."
        return {path[len(start) :]: given for path, given in self.values.items() if path.startswith(start)}

    def get(self, path: str) -> Any:
        given = self.values.get(path)
        return None if given is None else given.value


def load(
    file: Path | None,
    overrides: Sequence[tuple[str, Any, str]] = (),
    *,
    registry: Registry | None = None,
    base: Mapping[str, Any] | None = None,
) -> Config:
    """Resolve a configuration file (or none), then overrides `(path, value, origin)`, into a `Config`.

    `base` is a configuration that lies below the file, such as the one a resumed run wrote. Raises `ConfigError` for an
    unknown key or wrong value and `PluginError` for plugins that are unknown or do not fit each other.
    """
    registry = registry or Registry()
    layers = _Layers()
    if base is not None:
        _read_layer(layers, base, "the run's own config.yaml")
    if file is not None:
        _read_layer(layers, read_yaml(file), str(file))
    for path, value, origin in overrides:
        _override(layers, path, value, origin)
    return _resolve(layers, registry)


def parse_assignment(text: str) -> tuple[str, Any, str]:
    """Return the override that `--set section.key=value` means."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or ("." not in path and path not in FLAGS):
        raise ConfigError(f"--set {text!r}: expected section.key=value, such as tinker.lora_rank=8")
    return path, parse_value(value), f"--set {path}"


def _read_layer(layers: _Layers, content: Mapping[str, Any], origin: str) -> None:
    for section, entries in content.items():
        if section in FLAGS:
            if not isinstance(entries, bool):
                raise ConfigError(f"{section}: expected true or false, got {entries!r}")
            layers.put(section, Given(entries, origin))
            continue
        if section == "openai":
            entries = _first_server(entries, layers, origin)
        if entries is None:
            continue
        if not isinstance(entries, Mapping):
            raise ConfigError(f"{section}: expected a section of keys, got {entries!r:.60} ({type(entries).__name__})")
        for key, value in entries.items():
            layers.put(f"{section}.{key}", Given(value, origin))


def _first_server(entries: Any, layers: _Layers, origin: str) -> Any:
    """`openai` is one mapping or a list of them; the first names the model, the others are checked and not used."""
    if not isinstance(entries, list):
        return entries
    for place, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise ConfigError(f"openai.{place}: expected a mapping of keys, got {entry!r:.60}")
        if place:
            validate(OpenAISection, entry, path=f"openai.{place}")
            layers.put(f"openai[{place}]", Given(True, origin))
    return entries[0] if entries else None


def _override(layers: _Layers, path: str, value: Any, origin: str) -> None:
    parts = path.split(".")
    if parts[0] == "openai" and len(parts) == 3 and parts[1] == "0":
        parts = ["openai", parts[2]]
    if len(parts) > 2:
        # A key inside a mapping: `managed_server.chat_template_kwargs.enable_thinking`.
        head, inner = ".".join(parts[:2]), parts[2:]
        current = layers.get(head)
        tree: dict[str, Any] = dict(current) if isinstance(current, Mapping) else {}
        here = tree
        for part in inner[:-1]:
            here[part] = dict(here[part]) if isinstance(here.get(part), Mapping) else {}
            here = here[part]
        here[inner[-1]] = value
        parts, value = parts[:2], tree
    layers.put(".".join(parts), Given(value, origin, override=True))


def _resolve(layers: _Layers, registry: Registry) -> Config:
    environment_spec = _environment_spec(layers, registry)
    trainer_spec = _plugin(layers, registry, "trainer", "--trainer tinker")
    adapter_name = layers.get("rollout.adapter") or RolloutSection().adapter
    if not isinstance(adapter_name, str):
        raise ConfigError(f"rollout.adapter: expected a name, got {adapter_name!r}")
    adapter_spec = registry.load("adapter", adapter_name)
    check_fit(environment_spec, trainer_spec, adapter_spec, registry)
    own = {"env": environment_spec, "trainer": trainer_spec, "adapter": adapter_spec}
    _check_names(own)
    _check_sections(layers, own, registry)

    origins: dict[str, str] = {}
    for defaults, owner in ((environment_spec.defaults, environment_spec), (trainer_spec.defaults, trainer_spec)):
        for path, value in defaults.items():
            if path not in layers.values:
                layers.put(path, Given(value, f"suits {owner.name}"))

    sections = {
        name: _section(layers, name, model, origins, aside=_fields(own[name].config) if name == "env" else ())
        for name, model in SECTIONS.items()
    }
    plugins = {
        "env": _plugin_section(layers, environment_spec, "env", origins, core=EnvSection.model_fields),
        "trainer": _plugin_section(layers, trainer_spec, "trainer", origins),
        "adapter": _plugin_section(layers, adapter_spec, None, origins),
    }
    run: Any = sections["run"]
    if run.name is None:
        run = run.model_copy(update={"name": _run_name(environment_spec.name, trainer_spec.name)})
    _check_run_name(run.name)
    config = Config(
        run=run.model_copy(update={"trainer": trainer_spec.name}),
        env=sections["env"],  # type: ignore[arg-type]
        openai=sections["openai"],  # type: ignore[arg-type]
        rollout=sections["rollout"],  # type: ignore[arg-type]
        services=sections["services"],  # type: ignore[arg-type]
        environment=plugins["env"],
        trainer=plugins["trainer"],
        adapter=plugins["adapter"],
        environment_spec=environment_spec,
        trainer_spec=trainer_spec,
        adapter_spec=adapter_spec,
        origins=origins,
        unused=_unused(layers, own, plugins["trainer"]),
    )
    _check_sizes(config)
    _refuse_idle_overrides(layers, config)
    return config


def _environment_spec(layers: _Layers, registry: Registry) -> Any:
    name = layers.get("run.env")
    if isinstance(name, str) and is_file_reference(name):
        return registry.add("env", load_file(name))
    return _plugin(layers, registry, "env", "--env gsm8k")


def _plugin(layers: _Layers, registry: Registry, kind: Literal["env", "trainer"], example: str) -> Any:
    name = layers.get(f"run.{kind}")
    if name is None:
        names = ", ".join(plugin.name for plugin in registry.listed(kind)) or "none"
        raise ConfigError(f"run.{kind}: not given; say `{example}`. Installed: {names}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"run.{kind}: expected a plugin's name, got {name!r}")
    return registry.load(kind, name)


def check_fit(environment_spec: Any, trainer_spec: Any, adapter_spec: Any, registry: Registry) -> None:
    """Raise `PluginError` if the trainer can't learn the environment, naming installed trainers that could."""
    missing = sorted(environment_spec.needs - trainer_spec.can)
    if environment_spec.kind in trainer_spec.kinds and not missing:
        if environment_spec.kind == "text" and not adapter_spec.sessions:
            raise PluginError(
                f"rollout.adapter: {adapter_spec.name!r} opens no text sessions; use rollout.adapter=managed_server"
            )
        return
    could = []
    for plugin in registry.listed("trainer"):
        try:
            other = registry.load("trainer", plugin.name)
        except PluginError:
            continue
        if environment_spec.kind in other.kinds and environment_spec.needs <= other.can:
            could.append(other.name)
    kinds = ", ".join(sorted(trainer_spec.kinds))
    lacks = (
        f"is of kind {environment_spec.kind!r}, and trainer {trainer_spec.name!r} learns {kinds}"
        if environment_spec.kind not in trainer_spec.kinds
        else f"needs {', '.join(missing)}, which trainer {trainer_spec.name!r} can't"
    )
    raise PluginError(
        f"environment {environment_spec.name!r} {lacks}. "
        f"Installed trainers that could: {', '.join(sorted(set(could))) or 'none'}"
    )


def _fields(model: type[BaseModel]) -> Iterable[str]:
    return model.model_fields


def _check_names(own: Mapping[str, Any]) -> None:
    doubled = sorted(set(EnvSection.model_fields) & set(_fields(own["env"].config)))
    if doubled:
        raise PluginError(
            f"environment {own['env'].name!r} defines the settings {', '.join(doubled)}, which every run has already; "
            "rename them in the plugin"
        )
    for kind in ("env", "trainer", "adapter"):
        if normal(own[kind].name) in (*SECTIONS, *FLAGS, "trainer"):
            raise PluginError(f"a plugin can't be called {own[kind].name!r}: that is a section of every configuration")


def _check_sections(layers: _Layers, own: Mapping[str, Any], registry: Registry) -> None:
    used = {normal(spec.name) for spec in own.values()}
    installed = {normal(plugin.name) for kind in KINDS for plugin in registry.listed(kind)}
    known = {*SECTIONS, *FLAGS, "trainer", "tinker", *used, *installed}
    for path in layers.values:
        section = path.partition(".")[0].partition("[")[0]
        if normal(section) not in known:
            raise ConfigError(f"{section}: unknown section.{near(section, known)} Known: {', '.join(sorted(known))}")


def _section(
    layers: _Layers, name: str, model: type[Section], origins: dict[str, str], aside: Iterable[str] = ()
) -> Section:
    given = {key: entry for key, entry in layers.under(name).items() if key not in aside}
    if name == "env":
        _known_keys(given, [*model.model_fields, *aside], name)
    made = validate(model, {key: entry.value for key, entry in given.items()}, path=name)
    for key in model.model_fields:
        origins[f"{name}.{key}"] = given[key].origin if key in given else "default"
    return made


def _known_keys(given: Mapping[str, Any], known: Sequence[str], path: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{path}.{key}: unknown key.{near(key, known)} Known keys: {', '.join(known)}")


def _plugin_section(
    layers: _Layers, spec: Any, alias: str | None, origins: dict[str, str], core: Iterable[str] = ()
) -> Any:
    """A plugin's keys stand in a section of its own name, or beside the common ones in `env` or `trainer`."""
    name = normal(spec.name)
    given = {key: entry for section in {name, spec.name} for key, entry in layers.under(section).items()}
    if alias is not None:
        for key, entry in layers.under(alias).items():
            if key in core:
                continue
            if key in given and entry.value != given[key].value:
                if given[key].override == entry.override:
                    raise ConfigError(
                        f"{alias}.{key} and {name}.{key} are one setting, given as {entry.value!r} ({entry.origin}) "
                        f"and {given[key].value!r} ({given[key].origin}); keep one"
                    )
                entry = entry if entry.override else given[key]
            given[key] = entry
        if alias != "env":
            _known_keys(given, list(_fields(spec.config)), alias)
    made = validate(spec.config, {key: entry.value for key, entry in given.items()}, path=name)
    for key in spec.config.model_fields:
        origins[f"{name}.{key}"] = given[key].origin if key in given else "default"
    return made


def _unused(layers: _Layers, own: Mapping[str, Any], trainer_config: Any) -> dict[str, str]:
    """Return every key somebody wrote that has no effect in this mode, with the reason."""
    reasons = dict(UNUSED)
    if layers.get("rollout.max_staleness") is not None:
        reasons["env.max_batches_offpolicy"] = "rollout.max_staleness is given"
    if own["trainer"].unused is not None:
        name = normal(own["trainer"].name)
        for key, reason in own["trainer"].unused(trainer_config).items():
            reasons[f"{name}.{key}"] = reasons[f"trainer.{key}"] = reason
    used = {normal(spec.name) for spec in own.values()}
    idle: dict[str, str] = {}
    for path, given in layers.values.items():
        section = normal(path.partition(".")[0])
        if path in reasons:
            # A resolved file names every key; those at rest (null, false) say nothing.
            if given.value not in (None, False):
                idle[path] = reasons[path]
        elif path.startswith("openai["):
            idle[path] = "only the first entry names the model"
        elif section not in SECTIONS and section not in (*used, *FLAGS, "trainer"):
            idle[path] = f"{section} takes no part in this run"
    return idle


def _refuse_idle_overrides(layers: _Layers, config: Config) -> None:
    for path, reason in config.unused.items():
        given = layers.values[path]
        if given.override:
            raise ConfigError(f"{given.origin}: has no effect here: {reason}; leave it out")


def _run_name(environment: str, trainer: str) -> str:
    import time

    return f"{normal(environment)}-{normal(trainer)}-{time.strftime('%Y%m%d-%H%M%S')}"


def _check_run_name(name: str) -> None:
    if not name or name in (".", "..") or any(part in name for part in ("/", "\\", "\0", "\n")) or len(name) > 100:
        raise ConfigError(f"run.name: {name!r:.120} can't name a folder; use letters, digits, '-' and '_', 100 at most")


def _check_sizes(config: Config) -> None:
    size, batch = config.env.group_size, config.env.batch_size
    if batch % size:
        below = batch // size * size
        raise ConfigError(
            f"env.batch_size: {batch} counts trajectories and must be a multiple of env.group_size {size}; "
            f"use {' or '.join(str(n) for n in (below, below + size) if n)}"
        )
    if size == 1 and config.env.ensure_scores_are_not_same:
        raise ConfigError(
            "env.group_size: a group of 1 always has equal scores, which env.ensure_scores_are_not_same filters out; "
            "use a group_size of 2 or more"
        )
    least = config.rollout.min_group_size
    if least is not None and least > size:
        raise ConfigError(f"rollout.min_group_size: {least} is more than env.group_size {size}")
