"""Any registered Gymnasium environment as an environment plugin; the MuJoCo locomotion tasks on their fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos import EnvironmentSpec


@hookimpl
def environment_spec() -> EnvironmentSpec:
    """Return the environment `gymnasium`."""
    from tinker_atropos import EnvironmentSpec

    from tinker_atropos_gymnasium.config import GymnasiumConfig
    from tinker_atropos_gymnasium.environment import make

    return EnvironmentSpec(
        name="gymnasium",
        kind="control",
        make=make,
        config=GymnasiumConfig,
        description="any registered Gymnasium id, such as CartPole-v1 or HalfCheetah-v5 (env.id)",
    )
