"""YAML file and overrides → strict models, each value with its origin. Knows plugins only by their specifications."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from pydantic import BaseModel

from tinker_atropos import layers
from tinker_atropos.errors import ConfigError, PluginError
from tinker_atropos.layers import Given
from tinker_atropos.registry import (
    KINDS,
    WORDS,
    Registry,
    is_file_reference,
    load_file,
    normal,
    read_references,
    split_reference,
)
from tinker_atropos.rollout.control_plan import control_plan, derived_length, idle_keys, is_control, settle_length
from tinker_atropos.sections import (
    FLAGS,
    SECTIONS,
    UNUSED,
    EnvSection,
    OpenAISection,
    RolloutSection,
    RunSection,
    ServicesSection,
)
from tinker_atropos.validation import check_folder_name, validate
from tinker_atropos.yaml_file import parse_value, read_yaml

__all__ = ["Config", "Given", "check_fit", "load", "parse_assignment", "peek", "validate"]

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class Config:
    """A resolved configuration. `environment`, `trainer` and `adapter` are the plugins' own models.

    `adapter` and `adapter_spec` are None where the environment is of kind `control`.
    """

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
        """Return it in the shape of a file: reading that file again gives this configuration.

        But for `openai.api_key`: it has no effect, and a secret is not copied into another file. Of a control run's two
        lengths only the one that decides is in it.
        """
        dump = {"mode": "json"}
        content: dict[str, Any] = {
            "run": self.run.model_dump(**dump),  # type: ignore[arg-type]
            "env": self.env.model_dump(**dump),  # type: ignore[arg-type]
            "openai": {**self.openai.model_dump(**dump), "model_name": self.model, "api_key": None},  # type: ignore[arg-type]
            "rollout": self.rollout.model_dump(**dump),  # type: ignore[arg-type]
            "services": self.services.model_dump(**dump),  # type: ignore[arg-type]
            normal(self.environment_spec.name): self.environment.model_dump(**dump),
            normal(self.trainer_spec.name): self.trainer.model_dump(**dump),
            **({} if self.adapter is None else {normal(self.adapter_spec.name): self.adapter.model_dump(**dump)}),
        }
        if (derived := derived_length(self)) is not None:
            section, _, key = derived.partition(".")
            del content[section][key]
        return content


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
    return _resolve(_read(file, overrides, base), registry or Registry())


def peek(file: Path | None, overrides: Sequence[tuple[str, Any, str]], path: str) -> Any:
    """Return what file and overrides give a path such as `run.name`, None where they don't; loads no plugin."""
    return layers.peek(_read(file, overrides, None), path)


def parse_assignment(text: str) -> tuple[str, Any, str]:
    """Return the override that `--set section.key=value` means."""
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or ("." not in path and normal(path) not in FLAGS):
        hint = f"; for the plugin say --{path}" if path in ("env", "trainer") else ""
        raise ConfigError(f"--set {text!r}: expected section.key=value, such as tinker.lora_rank=8{hint}")
    return path, parse_value(value), f"--set {path}"


def _read(
    file: Path | None, overrides: Sequence[tuple[str, Any, str]], base: Mapping[str, Any] | None
) -> list[layers.Layer]:
    read = [] if base is None else [layers.read_layer(base, layers.RUN_CONFIG)]
    if file is not None:
        read.append(layers.read_layer(read_yaml(file), str(file)))
    return [*read, layers.read_overrides(overrides)]


def _resolve(written: Sequence[layers.Layer], registry: Registry) -> Config:
    environment_spec, referred = _environment_spec(written, registry)
    written = [*written, *referred]
    trainer_spec = _plugin(layers.peek(written, "run.trainer"), registry, "trainer", "--trainer tinker")
    _check_kind(environment_spec, trainer_spec, registry)
    adapter_spec = None if environment_spec.kind == "control" else _adapter_spec(written, registry)
    check_fit(environment_spec, trainer_spec, adapter_spec, registry)
    own = {"env": environment_spec, "trainer": trainer_spec}
    if adapter_spec is not None:
        own["adapter"] = adapter_spec
    _check_names(own)
    names = {kind: normal(spec.name) for kind, spec in own.items()}
    installed = {normal(plugin.name) for kind in KINDS for plugin in registry.listed(kind)}
    layers.check_sections(written, {"trainer", "tinker", *names.values(), *installed})

    owners = [
        layers.Owner(names["env"], environment_spec.config.model_fields, "env"),
        layers.Owner(names["trainer"], trainer_spec.config.model_fields, "trainer"),
    ]
    if adapter_spec is not None:
        owners.append(layers.Owner(names["adapter"], adapter_spec.config.model_fields))
    # An environment's defaults lie over a trainer's: it knows better what suits its tasks.
    defaults = [_defaults(spec, names.values(), owners) for spec in (trainer_spec, environment_spec)]
    merged = layers.merge([*defaults, *written], owners)
    origins: dict[str, str] = {}
    sections: dict[str, Any] = {name: _section(merged, name, model, origins) for name, model in SECTIONS.items()}
    plugins = {kind: _section(merged, names[kind], own[kind].config, origins) for kind in own}
    apart = merged.extra_servers | {flag: merged.values[flag] for flag in FLAGS if flag in merged.values}
    origins.update({path: given.origin for path, given in apart.items()})
    run: Any = sections["run"]
    config = Config(
        run=run.model_copy(
            update={
                "name": _run_name(*names.values()) if run.name is None else run.name,
                "env": _written_env(run.env, environment_spec.name),
                "trainer": trainer_spec.name,
            }
        ),
        env=sections["env"],
        openai=sections["openai"],
        rollout=sections["rollout"],
        services=sections["services"],
        environment=plugins["env"],
        trainer=plugins["trainer"],
        adapter=plugins.get("adapter"),
        environment_spec=environment_spec,
        trainer_spec=trainer_spec,
        adapter_spec=adapter_spec,
        origins=origins,
    )
    check_folder_name("run.name", config.name)
    if is_control(config):
        config = settle_length(config, merged.values)
        control_plan(config)
    else:
        _check_sizes(config)
    return replace(config, unused=_unused(merged, config, names.values()))


def _environment_spec(written: Sequence[layers.Layer], registry: Registry) -> tuple[Any, list[layers.Layer]]:
    """Return the environment's specification, and a layer of the settings that its name brings along."""
    name = layers.peek(written, "run.env")
    if isinstance(name, str) and is_file_reference(name):
        return registry.add("env", load_file(name)), []
    names = [name] if isinstance(name, str) else name
    if not isinstance(names, list | tuple) or not names or not all(isinstance(one, str) for one in names):
        return _plugin(name, registry, "env", "--env gsm8k"), []
    split = [split_reference(one) for one in names]
    if len(split) > 1 and (len({normal(plugin) for plugin, _ in split}) > 1 or any(rest is None for _, rest in split)):
        raise ConfigError(
            f"run.env: {', '.join(names)}: one run has one environment; only one that takes several, such as "
            "`--env atropos:a.py --env atropos:b.py`, may be named more than once"
        )
    spec = _plugin(split[0][0], registry, "env", "--env gsm8k")
    settings = read_references(spec, [rest for _, rest in split])
    if not settings:
        return spec, []
    return spec, [layers.read_overrides((f"env.{key}", value, "--env") for key, value in settings.items())]


def _plugin(name: Any, registry: Registry, kind: Literal["env", "trainer"], example: str) -> Any:
    if name is None:
        names = ", ".join(plugin.name for plugin in registry.listed(kind)) or "none"
        own = ", or your own `--env ./my_env.py:env`" if kind == "env" else ""
        raise ConfigError(f"run.{kind}: not given; say `{example}`{own}. Installed: {names}")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"run.{kind}: expected a plugin's name, got {name!r}")
    return registry.load(kind, name)


def _adapter_spec(written: Sequence[layers.Layer], registry: Registry) -> Any:
    name = layers.peek(written, "rollout.adapter")
    name = RolloutSection().adapter if name is None else name
    if not isinstance(name, str) or not name:
        raise ConfigError(f"rollout.adapter: expected a plugin's name, got {name!r}")
    return registry.load("adapter", name)


def _defaults(spec: Any, used: Iterable[str], owners: Sequence[layers.Owner]) -> layers.Layer:
    """Return a plugin's defaults as a layer, but for those of plugins that take no part in this run."""
    origin = f"suits {spec.name}"
    taking_part = {*SECTIONS, "trainer", *used}
    fitting = [
        (path, value, origin) for path, value in spec.defaults.items() if normal(path.split(".")[0]) in taking_part
    ]
    try:
        layer = layers.read_overrides(fitting)
        for place, entry in enumerate(layer.written):
            layer.written[place] = replace(entry, given=replace(entry.given, override=False))
        layers.merge([layer], owners)
    except ConfigError as error:
        raise PluginError(f"plugin {spec.name!r} has a wrong default: {error}") from None
    return layer


def _check_kind(environment_spec: Any, trainer_spec: Any, registry: Registry) -> None:
    missing = sorted(environment_spec.needs - trainer_spec.can)
    # An environment that drives itself hands in groups of text.
    learnt = "text" if environment_spec.kind == "external" else environment_spec.kind
    if learnt in trainer_spec.kinds and not missing:
        return
    could = []
    for plugin in registry.listed("trainer"):
        try:
            other = registry.load("trainer", plugin.name)
        except PluginError:
            continue
        if learnt in other.kinds and environment_spec.needs <= other.can:
            could.append(other.name)
    kinds = ", ".join(sorted(trainer_spec.kinds)) or "nothing"
    lacks = (
        f"is of kind {environment_spec.kind!r}, and trainer {trainer_spec.name!r} learns {kinds}"
        if learnt not in trainer_spec.kinds
        else f"needs {', '.join(missing)}, which trainer {trainer_spec.name!r} can't"
    )
    raise PluginError(
        f"environment {environment_spec.name!r} {lacks}. "
        f"Installed trainers that could: {', '.join(sorted(set(could))) or 'none'}"
    )


def check_fit(environment_spec: Any, trainer_spec: Any, adapter_spec: Any, registry: Registry) -> None:
    """Raise `PluginError` if the trainer can't learn the environment, naming installed trainers that could."""
    _check_kind(environment_spec, trainer_spec, registry)
    if environment_spec.kind == "text" and not adapter_spec.sessions:
        raise PluginError(
            f"rollout.adapter: {adapter_spec.name!r} opens no text sessions; use rollout.adapter=managed_server"
        )
    if environment_spec.kind == "external" and adapter_spec.endpoint is None:
        raise PluginError(
            f"rollout.adapter: {adapter_spec.name!r} puts no policy behind HTTP, and environment "
            f"{environment_spec.name!r} samples there; use rollout.adapter=managed_server"
        )


def _check_names(own: Mapping[str, Any]) -> None:
    doubled = sorted(set(EnvSection.model_fields) & set(own["env"].config.model_fields))
    if doubled:
        raise PluginError(
            f"environment {own['env'].name!r} defines the settings {', '.join(doubled)}, which every run has already; "
            "rename them in the plugin"
        )
    seen: dict[str, str] = {}
    for kind, spec in own.items():
        name = normal(spec.name)
        if name in (*SECTIONS, *FLAGS, "trainer"):
            raise PluginError(f"a plugin can't be called {spec.name!r}: that is a section of every configuration")
        if name in seen:
            raise PluginError(
                f"{WORDS[seen[name]]} and {WORDS[kind]} of this run are both called {spec.name!r}, so the section "  # type: ignore[index]
                f"{name!r} of the configuration would be both's; rename one of the plugins"
            )
        seen[name] = kind


def _section(merged: layers.Layers, name: str, model: type[Model], origins: dict[str, str]) -> Model:
    given = merged.under(name)
    written = {key: entry.origin for key, entry in given.items()}
    made = validate(model, {key: entry.value for key, entry in given.items()}, path=name, origins=written)
    origins.update({f"{name}.{key}": written.get(key, "default") for key in model.model_fields})
    return made


def _unused(merged: layers.Layers, config: Config, used: Iterable[str]) -> dict[str, str]:
    """Return every key that was written and has no effect in this mode, with the reason; refuses overrides of such."""
    never = dict(UNUSED)
    trainer_spec, section = config.trainer_spec, normal(config.trainer_spec.name)
    if trainer_spec.unused is not None:
        never |= {
            key if "." in key else f"{section}.{key}": reason
            for key, reason in trainer_spec.unused(config.trainer).items()
        }
    here, of_other_kinds = _idle_here(config), idle_keys(config)
    taking_part = {*SECTIONS, *FLAGS, *used}
    idle = dict.fromkeys(merged.extra_servers, "only the first entry names the model")
    for path, given in merged.values.items():
        section = path.partition(".")[0]
        if path in never:
            # A resolved file names every key; at rest those say nothing.
            if not _at_rest(path, given.value) and (given.override or not _is_default(config, path, given.value)):
                idle[path] = never[path]
        elif path in of_other_kinds:
            if given.override or not _at_rest(path, given.value):
                idle[path] = of_other_kinds[path]
        elif path in here and (given.override or given.origin != layers.RUN_CONFIG):
            idle[path] = here[path]
        elif section not in taking_part:
            idle[path] = f"{section} takes no part in this run"
    for path, reason in idle.items():
        written = merged.values.get(path)
        if written is not None and written.override:
            raise ConfigError(f"{written.origin}: has no effect here: {reason}; leave it out")
    return idle


def _idle_here(config: Config) -> dict[str, str]:
    """Return the keys that others of this configuration leave without effect."""
    idle: dict[str, str] = {}
    if config.rollout.max_staleness is not None:
        idle["env.max_batches_offpolicy"] = "rollout.max_staleness is given"
    if not config.env.ensure_scores_are_not_same:
        idle["rollout.max_filtered_groups"] = "env.ensure_scores_are_not_same is false, so no group is filtered out"
    if not config.env.steps_per_eval:
        idle["rollout.eval_tasks"] = "env.steps_per_eval is 0, so nothing is evaluated"
        if not config.run.previews:
            idle["rollout.eval_temperature"] = idle["openai.num_requests_for_eval"] = idle["rollout.eval_tasks"]
    return idle


def _at_rest(path: str, value: Any) -> bool:
    if path in FLAGS:
        return False  # no resolved file names them, so somebody wrote it
    if value is None or value is False:
        return True
    section, _, key = path.partition(".")
    field_info = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
    return field_info is not None and value == field_info.default and type(value) is type(field_info.default)


def _written_env(name: str | tuple[str, ...] | None, plugin: str) -> str | tuple[str, ...]:
    """Return the environment as a file is to name it: in the plugin's own spelling, with what follows a colon."""
    names = [name] if isinstance(name, str) else list(name or ())
    said = tuple(one if is_file_reference(one) or split_reference(one)[1] is not None else plugin for one in names)
    return said[0] if len(said) == 1 else said


def _is_default(config: Config, path: str, value: Any) -> bool:
    """Whether a value of the trainer's section is the one that it would have anyway."""
    section, _, key = path.partition(".")
    known = config.trainer_spec.config.model_fields if section == normal(config.trainer_spec.name) else {}
    return key in known and bool(value == known[key].get_default(call_default_factory=True))


def _run_name(environment: str, trainer: str, *_: str) -> str:
    import time

    return f"{environment}-{trainer}-{time.strftime('%Y%m%d-%H%M%S')}"


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
            "use a group_size of 2 or more, or env.ensure_scores_are_not_same=false"
        )
    least = config.rollout.min_group_size
    if least is not None and least > size:
        raise ConfigError(f"rollout.min_group_size: {least} is more than env.group_size {size}")


if TYPE_CHECKING:
    TinkerAtroposConfig: Any
else:

    def __getattr__(name: str) -> Any:
        """Find what the original kept here; see `compat`."""
        from tinker_atropos.compat import find

        return find(__name__, name)
