"""Gymnasium's Humanoid-v5 as an environment plugin, all simulations stepped in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos import EnvironmentSpec

# What configs/humanoid.yaml sets for this trainer, whose own defaults suit smaller tasks (docs/control-results.md).
TUNED = {
    "torch_ppo.steps_per_update": 128,
    "torch_ppo.epochs": 5,
    "torch_ppo.minibatches": 8,
    "torch_ppo.learning_rate": 3e-4,
    "torch_ppo.log_std_init": -2.0,
    "torch_ppo.save_checkpoint_interval": 50,
}


@hookimpl
def environment_spec() -> EnvironmentSpec:
    """Return the environment `humanoid`."""
    from tinker_atropos import EnvironmentSpec

    from tinker_atropos_humanoid.config import HumanoidConfig, make

    return EnvironmentSpec(
        name="humanoid",
        kind="control",
        make=make,
        config=HumanoidConfig,
        defaults=TUNED,
        description="MuJoCo Humanoid-v5: walk forward without falling, bit-equal to Gymnasium's",
    )
