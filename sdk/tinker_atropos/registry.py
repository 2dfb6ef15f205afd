"""Finds plugins by entry point and loads one by name. Listing imports none of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypeAlias

import pluggy

from tinker_atropos.errors import PluginError, TinkerAtroposError, near
from tinker_atropos.hookspecs import PROJECT, Hooks

PluginKind: TypeAlias = Literal["env", "trainer", "adapter"]

GROUPS: dict[PluginKind, str] = {
    "env": "tinker_atropos.envs",
    "trainer": "tinker_atropos.trainers",
    "adapter": "tinker_atropos.adapters",
}
HOOKS: dict[PluginKind, str] = {
    "env": "environment_spec",
    "trainer": "trainer_spec",
    "adapter": "adapter_spec",
}
KINDS: tuple[PluginKind, ...] = ("env", "trainer", "adapter")

WORDS: dict[PluginKind, str] = {"env": "environment", "trainer": "trainer", "adapter": "adapter"}


NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*", re.ASCII)
"""What a plugin may be called: its name is also a section of the configuration and part of a folder's name."""


def normal(name: str) -> str:
    """Return the form in which plugin names compare: `-` equals `_`, case does not count."""
    return name.replace("-", "_").lower()


@dataclass(frozen=True, slots=True)
class Listed:
    """A plugin that some installed distribution offers. Nothing of it was imported."""

    kind: PluginKind
    name: str
    distribution: str
    version: str
    module: str


class Registry:
    """The plugins of this interpreter. Construct it with `entry_points` of your own to test without an installation."""

    def __init__(self, points: Iterable[EntryPoint] | None = None) -> None:
        self._points = None if points is None else list(points)
        self._hooks = pluggy.PluginManager(PROJECT)
        self._hooks.add_hookspecs(Hooks)
        self._loaded: dict[tuple[PluginKind, str], Any] = {}

    @property
    def hooks(self) -> Any:
        """The hook caller, for `hooks.on_metrics(step=…, metrics=…)` and its like."""
        return self._hooks.hook

    def listed(self, kind: PluginKind) -> list[Listed]:
        """Return what is installed, by name; two of one name both appear."""
        return sorted(
            (
                Listed(
                    kind=kind,
                    name=point.name,
                    distribution=_distribution(point),
                    version=_version(point),
                    module=point.value,
                )
                for point in self._of(kind)
            ),
            key=lambda plugin: (normal(plugin.name), plugin.distribution),
        )

    def load(self, kind: PluginKind, name: str) -> Any:
        """Return the specification of the plugin of that kind and name; raises `PluginError` with the way on."""
        key = (kind, normal(name))
        if key not in self._loaded:
            self._loaded[key] = self._load(kind, name)
        return self._loaded[key]

    def add(self, kind: PluginKind, spec: Any) -> Any:
        """Make a specification of this process known under its own name; returns it."""
        self._loaded[(kind, normal(spec.name))] = spec
        return spec

    def status(self, kind: PluginKind) -> list[tuple[Listed, str]]:
        """Load every plugin of a kind; return each with an error text, empty where it is sound."""
        found = []
        for plugin in self.listed(kind):
            try:
                self.load(kind, plugin.name)
            except TinkerAtroposError as error:
                found.append((plugin, str(error)))
            else:
                found.append((plugin, ""))
        return found

    def _of(self, kind: PluginKind) -> list[EntryPoint]:
        if self._points is not None:
            return [point for point in self._points if point.group == GROUPS[kind]]
        # One distribution may be found twice on sys.path (an editable install beside its build): count it once.
        unique = {(p.name, p.value, normal(_distribution(p))): p for p in _installed(GROUPS[kind])}
        return list(unique.values())

    def _load(self, kind: PluginKind, name: str) -> Any:
        word = WORDS[kind]
        points = self._of(kind)
        matches = [point for point in points if normal(point.name) == normal(name)]
        if not matches:
            known = sorted({point.name for point in points})
            raise PluginError(f"no {word} is called {name!r:.80}.{_way_on(kind, name, known)}")
        if len(matches) > 1:
            owners = " and ".join(f"{_distribution(point)} ({point.value})" for point in matches)
            raise PluginError(f"{len(matches)} {word}s are called {name!r}: {owners}; uninstall all but one")
        return self._spec(kind, matches[0])

    def _spec(self, kind: PluginKind, point: EntryPoint) -> Any:
        word, owner = WORDS[kind], _distribution(point)
        try:
            with redirect_stdout(sys.stderr):  # stdout is for data; a plugin that prints must not spoil it
                module = point.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and what test frameworks skip with
            raise PluginError(
                f"{word} {point.name!r} of {owner} can't be imported from {point.value!r}: "
                f"{_said(error)}; repair or uninstall {owner}"
            ) from error
        if not isinstance(module, ModuleType):
            raise PluginError(
                f"{word} {point.name!r} of {owner}: its entry point {point.value!r} is {type(module).__name__}, "
                "and must be a module"
            )
        return self._register(kind, point.name, module, owner)

    def _register(self, kind: PluginKind, name: str, module: ModuleType, owner: str) -> Any:
        word, hook = WORDS[kind], HOOKS[kind]
        # A manager of its own per plugin: each implements the same hook, and one broken plugin must not reach another.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(Hooks)
        try:
            manager.register(module, f"{kind}:{normal(name)}")
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise PluginError(f"{word} {name!r} of {owner}: {_misspelt(module) or _said(error)}") from error
        _refuse_unmarked(module, word, name, owner)
        try:
            with redirect_stdout(sys.stderr):
                specs = getattr(manager.hook, hook)()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise PluginError(f"{word} {name!r} of {owner}: {hook} raised {_said(error)}") from error
        if len(specs) != 1:
            wrong = "returned None" if hasattr(module, hook) else "is missing"
            raise PluginError(
                f"{word} {name!r} of {owner}: in {module.__name__} the hook {hook} {wrong}; it must return the "
                f"plugin's specification"
            )
        spec = specs[0]
        _check_spec(kind, name, spec, owner)
        if self._hooks.get_plugin(f"{kind}:{normal(name)}") is None:
            self._hooks.register(module, f"{kind}:{normal(name)}")
        return spec


def _way_on(kind: PluginKind, name: str, known: list[str]) -> str:
    """Return what to do about an unknown name; a slip is no reason to install a package that nobody knows."""
    close = near(name, known)
    listing = f" Installed: {', '.join(known)}." if known else ""
    see = f"see `tinker-atropos {kind} list`" if kind != "adapter" else ""
    if close:
        return f"{close}{listing}" + (f" {see[0].upper()}{see[1:]}." if see else "")
    pip = f"pip install tinker-atropos-{normal(name).replace('_', '-')}" if NAME.fullmatch(name) else "with pip"
    return f"{listing} Install a plugin ({pip})" + (f", or {see}." if see else ".")


def _hook_names() -> list[str]:
    return [name for name in vars(Hooks) if not name.startswith("_")]


def _installed(group: str) -> Iterable[EntryPoint]:
    """Return a group's entry points; a distribution whose metadata can't be read offers none, and harms no other."""
    try:
        return entry_points(group=group)
    except Exception:
        found: list[EntryPoint] = []
        for distribution in distributions():
            try:
                found.extend(distribution.entry_points.select(group=group))
            except Exception:
                continue
        return found


def _distribution(point: EntryPoint) -> str:
    try:
        return str(point.dist.name or "unknown") if point.dist is not None else "unknown"
    except Exception:  # metadata without a name
        return "unknown"


def _version(point: EntryPoint) -> str:
    try:
        return str(point.dist.version or "unknown") if point.dist is not None else "unknown"
    except Exception:
        return "unknown"


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _misspelt(module: ModuleType) -> str:
    """Return what is wrong where a function is marked as a hook that does not exist."""
    hooks = _hook_names()
    for name, function in vars(module).items():
        if name not in hooks and getattr(function, f"{PROJECT}_impl", None) is not None:
            return f"unknown hook {name!r}.{near(name, hooks)} Hooks are {', '.join(hooks)}"
    return ""


def _refuse_unmarked(module: ModuleType, word: str, name: str, owner: str) -> None:
    """A hook's name without @hookimpl would be silently ignored by pluggy."""
    for hook in _hook_names():
        function = getattr(module, hook, None)
        if function is not None and not hasattr(function, f"{PROJECT}_impl"):
            raise PluginError(f"{word} {name!r} of {owner}: {hook} lacks the @hookimpl decorator")


def _check_spec(kind: PluginKind, name: str, spec: Any, owner: str) -> None:
    from pydantic import BaseModel

    from tinker_atropos.adapter import AdapterSpec
    from tinker_atropos.environment import EnvironmentSpec
    from tinker_atropos.trainer import TrainerConfig, TrainerSpec

    kinds: dict[PluginKind, type[Any]] = {"env": EnvironmentSpec, "trainer": TrainerSpec, "adapter": AdapterSpec}
    configs: dict[PluginKind, type[Any]] = {"env": BaseModel, "trainer": TrainerConfig, "adapter": BaseModel}
    expected, base = kinds[kind], configs[kind]
    if not isinstance(spec, expected):
        raise PluginError(
            f"{WORDS[kind]} {name!r} of {owner}: {HOOKS[kind]} returned {type(spec).__name__}, expected "
            f"{expected.__name__}"
        )
    if not isinstance(spec.name, str) or normal(spec.name) != normal(name):
        raise PluginError(
            f"{WORDS[kind]} {name!r} of {owner} calls itself {spec.name!r}; entry point and specification must agree"
        )
    if not NAME.fullmatch(spec.name):
        raise PluginError(f"{WORDS[kind]} {name!r} of {owner}: a plugin's name is made of letters, digits, '-' and '_'")
    if not (isinstance(spec.config, type) and issubclass(spec.config, base)):
        raise PluginError(
            f"{WORDS[kind]} {name!r} of {owner}: config is {spec.config!r:.80}, expected a class derived from "
            f"{'EnvironmentConfig, TrainerConfig or AdapterConfig' if base is BaseModel else base.__name__}"
        )
    if not callable(spec.make):
        raise PluginError(
            f"{WORDS[kind]} {name!r} of {owner}: make is {spec.make!r:.80}, expected a function of config"
        )


def load_file(reference: str) -> Any:
    """Return the EnvironmentSpec that `./my_env.py:env` names; raises `PluginError` with the line at fault."""
    from tinker_atropos.environment import EnvironmentSpec

    path_text, _, attribute = reference.rpartition(":")
    if not path_text or attribute.endswith(".py") or "/" in attribute:
        path_text, attribute = reference, "env"
    path = Path(path_text).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise PluginError(f"environment file {path_text!r} {what}; give it as ./my_env.py:name")
    module_name = f"tinker_atropos_file_{path.stem}"
    found = importlib.util.spec_from_file_location(module_name, path)
    if found is None or found.loader is None:
        raise PluginError(f"environment file {path_text!r} is no Python file; give it as ./my_env.py:name")
    module = importlib.util.module_from_spec(found)
    sys.modules[module_name] = module  # dataclasses and pickling look a class's module up here
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that it may import what lies beside it, also later
    try:
        with redirect_stdout(sys.stderr):
            found.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[module_name]
        if isinstance(error, KeyboardInterrupt):
            raise
        said = str(error) if isinstance(error, TinkerAtroposError) else _said(error)
        foreign = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == "atroposlib"
        hint = f"; an Atropos script is given as --env atropos:{path_text}" if foreign else ""
        raise PluginError(f"environment file {path_text!r} fails: {said}{_line(error, path)}{hint}") from error
    spec = getattr(module, attribute, None)
    if spec is None:
        offered = [key for key, value in vars(module).items() if isinstance(value, EnvironmentSpec)]
        raise PluginError(
            f"{path_text!r} defines no {attribute!r}.{near(attribute, offered)} "
            f"It defines these environments: {', '.join(offered) or 'none'}"
        )
    if not isinstance(spec, EnvironmentSpec):
        raise PluginError(
            f"{attribute!r} in {path_text!r} is {type(spec).__name__}, expected an EnvironmentSpec, as single_turn(…) "
            "returns"
        )
    _check_spec("env", str(spec.name), spec, repr(path_text))
    return spec


def split_reference(name: str) -> tuple[str, str | None]:
    """Return the plugin that `atropos:path/to/env.py` names and what follows the colon; None where none does."""
    plugin, colon, rest = name.partition(":")
    return (plugin, rest) if colon and NAME.fullmatch(plugin) else (name, None)


def is_file_reference(name: str | None) -> bool:
    """Whether an environment name means a file: `./my_env.py:env`, `my_env.py`."""
    if name is None or split_reference(name)[1] is not None:
        return False
    return name.endswith(".py") or ".py:" in name or "/" in name


def read_references(spec: Any, rests: Sequence[str | None]) -> Mapping[str, Any]:
    """Return the settings that `NAME:…` stands for; raises `PluginError` where the environment takes none."""
    given = [rest for rest in rests if rest is not None]
    if not given:
        return {}
    if spec.reference is None:
        raise PluginError(
            f"environment {spec.name!r} takes nothing after a colon, got {given[0]!r:.80}; say `--env {spec.name}` and "
            "give its settings as --set env.key=value; a file of your own is ./my_env.py:name"
        )
    return dict(spec.reference(given))


def _line(error: BaseException, path: Path) -> str:
    """Return where in the file an error arose; a SyntaxError says so itself."""
    lines = []
    trace = error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == path.name:
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    return f" (line {lines[-1]})" if lines else ""


def load_environment(name: str, **config: Any) -> Any:
    """Return the environment `name`, made with these settings.

    `name` is an installed plugin or `./my_env.py:env`. Raises `PluginError` for an unknown name and `ConfigError` for
    an unknown setting or a wrong value.
    """
    from tinker_atropos.config import validate

    plugin, rest = split_reference(name)
    spec = load_file(name) if is_file_reference(name) else Registry().load("env", plugin)
    return spec.make(validate(spec.config, {**read_references(spec, [rest]), **config}, path=f"env {spec.name}"))


def load_trainer(name: str, **config: Any) -> Any:
    """Return the trainer `name`, made with these settings; errors as `load_environment`."""
    from tinker_atropos.config import validate

    spec = Registry().load("trainer", name)
    return spec.make(validate(spec.config, config, path=f"trainer {spec.name}"))
