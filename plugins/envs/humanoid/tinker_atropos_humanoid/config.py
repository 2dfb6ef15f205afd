"""The `env` section of a run with this environment, and how it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import ConfigDict
from tinker_atropos.errors import PluginError

from tinker_atropos_humanoid.locomotion import missing_mujoco
from tinker_atropos_humanoid.locomotion.options import HumanoidOptions, VectorOptions

if TYPE_CHECKING:
    from tinker_atropos_humanoid.locomotion.vector_env import LocomotionVectorEnv


class HumanoidConfig(HumanoidOptions, VectorOptions):
    """What the environment `humanoid` accepts: every option of Gymnasium's Humanoid-v5, and how many are run."""

    model_config = ConfigDict(ser_json_inf_nan="constants")


def make(config: HumanoidConfig) -> LocomotionVectorEnv:
    """Return the vector environment; raises `ConfigError` for a wrong model, `PluginError` without MuJoCo."""
    if (missing := missing_mujoco()) is not None:
        raise PluginError(f"environment 'humanoid' steps its simulations with {missing}")
    from tinker_atropos_humanoid.locomotion.tasks import TASKS
    from tinker_atropos_humanoid.locomotion.vector_env import LocomotionVectorEnv

    return LocomotionVectorEnv(TASKS["Humanoid-v5"], config, config)
