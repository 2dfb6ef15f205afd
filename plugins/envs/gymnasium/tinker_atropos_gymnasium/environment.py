"""Makes the vector environment: which vectorisation, which spaces go. Knows no task by name."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import gymnasium
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from tinker_atropos.errors import ConfigError, PluginError

from tinker_atropos_gymnasium.config import GymnasiumConfig, Vectorization
from tinker_atropos_gymnasium.guard import Guard
from tinker_atropos_gymnasium.registered import find, missing_extra

log = logging.getLogger(__name__)

FAST_PACKAGE = "tinker_atropos_humanoid"
OWN = {"num_envs", "threads", "autoreset", "max_episode_steps", "render_mode"}  # settings, and so no make_kwargs
AUTORESET = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}


def make(config: GymnasiumConfig) -> VectorEnv[Any, Any, Any]:
    """Return the vector environment; `metadata["vectorization"]` says which kind it is.

    Raises `ConfigError` for an unknown id, wrong `make_kwargs` or a space that is neither Box nor Discrete, and
    `PluginError`, with the pip command, for a missing package.
    """
    spec = find(config.id)
    twice = sorted(set(config.make_kwargs) & OWN)
    if twice:
        raise ConfigError(f"env.make_kwargs: {twice[0]!r} is no argument of {spec.id}; set env.{twice[0]}")
    kind = _vectorization(config, spec)
    env: VectorEnv[Any, Any, Any] = _fast(config, spec) if kind == "fast" else _gymnasium(config, spec, kind)
    env.metadata = {**env.metadata, "vectorization": kind}
    log.info("%s: %d simulations, vectorization %s", spec.id, config.num_envs, kind)
    return env


def _vectorization(config: GymnasiumConfig, spec: EnvSpec) -> Vectorization:
    obstacle = _no_fast_path(config, spec)
    if config.vectorization is None:
        return "sync" if obstacle else "fast"
    if config.vectorization == "fast" and obstacle:
        raise ConfigError(f"env.vectorization: {obstacle}; use sync or async, or leave it unset")
    return config.vectorization


def _no_fast_path(config: GymnasiumConfig, spec: EnvSpec) -> str | None:
    """Return why there is no fast path for this configuration; None: there is."""
    if importlib.util.find_spec(FAST_PACKAGE) is None:
        return "the fast path needs `pip install tinker-atropos-humanoid`"
    from tinker_atropos_humanoid.locomotion import LOCOMOTION_IDS, missing_mujoco

    if (missing := missing_mujoco()) is not None:
        return f"the fast path needs {missing}"
    if spec.id not in LOCOMOTION_IDS:
        return f"there is a fast path for {', '.join(LOCOMOTION_IDS)}, not for {spec.id}"
    return "the fast path has no window to render to (env.render_mode human)" if config.render_mode == "human" else None


def _fast(config: GymnasiumConfig, spec: EnvSpec) -> VectorEnv[Any, Any, Any]:
    from tinker_atropos_humanoid.locomotion import make_locomotion

    return make_locomotion(
        spec.id,
        num_envs=config.num_envs,
        threads=config.threads,
        autoreset=config.autoreset,
        max_episode_steps=config.max_episode_steps or spec.max_episode_steps,
        render_mode=config.render_mode,
        **config.make_kwargs,
    )


def _gymnasium(config: GymnasiumConfig, spec: EnvSpec, kind: Vectorization) -> VectorEnv[Any, Any, Any]:
    if config.threads:
        raise ConfigError(f"env.threads: {config.threads} has no effect with vectorization {kind}; leave it unset")
    own = {name: getattr(config, name) for name in ("max_episode_steps", "render_mode")}
    kwargs = {**config.make_kwargs, **{name: value for name, value in own.items() if value is not None}}
    try:
        single = gymnasium.make(spec, **kwargs)  # fails here, not in a worker process
        observation, action = single.observation_space, single.action_space
        single.close()
        _check_spaces(spec, observation, action)
        env = gymnasium.make_vec(
            spec,
            num_envs=config.num_envs,
            vectorization_mode=kind,
            vector_kwargs={"autoreset_mode": AUTORESET[config.autoreset]},
            **kwargs,
        )
    except (gymnasium.error.DependencyNotInstalled, ImportError) as error:
        raise missing_extra(spec, error) from error
    except gymnasium.error.DeprecatedEnv as error:
        raise ConfigError(f"env.id: {spec.id} is deprecated: {error}") from error
    except TypeError as error:
        raise ConfigError(
            f"env.make_kwargs: {spec.id} does not take {kwargs}: {error}; see the class's arguments in "
            "Gymnasium's documentation"
        ) from error
    return Guard(env, spec.id)


def _check_spaces(spec: EnvSpec, observation: spaces.Space[Any], action: spaces.Space[Any]) -> None:
    for name, space in (("observation", observation), ("action", action)):
        if not isinstance(space, spaces.Box | spaces.Discrete):
            raise PluginError(
                f"env.id: {spec.id} has the {name} space {space!s:.120}; Box and Discrete spaces are supported. "
                "Register an id of your own that flattens it (gymnasium.wrappers.FlattenObservation)"
            )
