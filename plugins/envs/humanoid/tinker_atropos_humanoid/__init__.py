"""Gymnasium's Humanoid-v5 as an environment plugin, all simulations stepped in one native call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos import EnvironmentSpec


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
        description="MuJoCo Humanoid-v5: walk forward without falling, bit-equal to Gymnasium's",
    )
