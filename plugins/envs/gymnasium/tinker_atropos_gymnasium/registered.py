"""Looks up a registered Gymnasium id, and says what is missing where it can't be had."""

from __future__ import annotations

import importlib
from typing import Any

import gymnasium
from gymnasium.envs.registration import EnvSpec
from tinker_atropos.errors import ConfigError, PluginError, near

# Module of an environment's entry point → the extra of Gymnasium that it needs.
EXTRAS = {
    "gymnasium.envs.box2d": "box2d",
    "gymnasium.envs.mujoco": "mujoco",
    "gymnasium.envs.toy_text": "toy-text",
    "gymnasium.envs.classic_control": "classic-control",
    "gymnasium.envs.phys2d": "jax",
    "gymnasium.envs.tabular": "jax",
    "ale_py": "atari",
    "shimmy": "atari",
}


def find(id: str) -> EnvSpec:
    """Return what is registered as `id`; raises `ConfigError` with the near name, or the missing module's."""
    module, colon, name = id.rpartition(":")
    if colon:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ConfigError(
                f"env.id: {id!r}: the module {module!r} can't be imported: {error}; install it into this environment, "
                "or set PYTHONPATH"
            ) from error
    if name in gymnasium.registry:
        return gymnasium.registry[name]
    try:
        return gymnasium.spec(name)  # an id without a version may be registered so
    except gymnasium.error.Error as error:
        base = name.rpartition("-v")[0] or name
        versions = [known for known in gymnasium.registry if known.rpartition("-v")[0] == base]
        if versions:
            hint = f" There is {', '.join(sorted(versions))}."
        elif name.startswith("ALE/"):
            hint = ' For Atari: `pip install "gymnasium[atari]"`, and env.id=ale_py:' + name
        else:
            hint = near(name, gymnasium.registry)
        raise ConfigError(
            f"env.id: {id!r} is no registered Gymnasium environment.{hint} `gymnasium.pprint_registry()` lists them; "
            "an environment of another package needs its module in front (`package:Id-v0`)"
        ) from error


def missing_extra(spec: EnvSpec, error: BaseException) -> PluginError:
    """Return the error that names the pip command for what an environment could not import."""
    entry = spec.entry_point if isinstance(spec.entry_point, str) else getattr(spec.entry_point, "__module__", "")
    extra: Any = next((name for module, name in EXTRAS.items() if entry.startswith(module)), None)
    command = f'pip install "gymnasium[{extra}]"' if extra else "install the package it belongs to, with its extras"
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return PluginError(f"env.id: {spec.id} needs a package that is not installed ({said}); `{command}`")
