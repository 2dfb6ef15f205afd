"""The fast path of Gymnasium's v5 locomotion tasks. Knows no task by name: they are rows of a table.

    make_locomotion("HalfCheetah-v5", num_envs=16, ctrl_cost_weight=0.2)

What a task is stands in `tasks`, what it accepts in `options`; `simulations` steps the physics, `vector_env` makes
observations, rewards and resets of it.
"""

from __future__ import annotations

import importlib.util
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinker_atropos_humanoid.locomotion.vector_env import LocomotionVectorEnv

LOCOMOTION_IDS = ("Ant-v5", "HalfCheetah-v5", "Hopper-v5", "Humanoid-v5", "Walker2d-v5")


def missing_mujoco() -> str | None:
    """Return what is missing of MuJoCo 4, with the pip command; None: nothing."""
    if importlib.util.find_spec("mujoco") is None:
        found = "it is not installed"
    elif importlib.util.find_spec("mujoco.batch") is None:
        found = f"{version('mujoco')} is installed, which has no mujoco.batch"
    else:
        return None
    return f"MuJoCo 4 or newer, and {found}; `pip install 'mujoco>=4' 'gymnasium[mujoco]'`"


def make_locomotion(id: str, **settings: Any) -> LocomotionVectorEnv:
    """Return a vector environment that equals `gymnasium.make_vec(id)`; `settings` as in `options`.

    Raises `ConfigError` for an id that has no fast path, an unknown setting or a wrong value, `PluginError` without
    MuJoCo 4.
    """
    from tinker_atropos.config import validate
    from tinker_atropos.errors import ConfigError, PluginError, near

    if (missing := missing_mujoco()) is not None:
        raise PluginError(f"{id!r} is stepped with {missing}")

    from tinker_atropos_humanoid.locomotion.options import VectorOptions
    from tinker_atropos_humanoid.locomotion.tasks import TASKS
    from tinker_atropos_humanoid.locomotion.vector_env import LocomotionVectorEnv

    if id not in TASKS:
        raise ConfigError(f"no fast path for {id!r}, only for {', '.join(TASKS)}.{near(id, TASKS)}")
    task = TASKS[id]
    vector = {name: value for name, value in settings.items() if name in VectorOptions.model_fields}
    options = {name: value for name, value in settings.items() if name not in vector}
    return LocomotionVectorEnv(task, validate(task.options, options, path=id), validate(VectorOptions, vector, path=id))
