"""Competition mathematics as an environment plugin: boxed answers of any kind, graded by math-verify in workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos import EnvironmentSpec


@hookimpl
def environment_spec() -> EnvironmentSpec:
    """Return the environment `math_server`."""
    from tinker_atropos import EnvironmentSpec

    from tinker_atropos_math_server.config import MathServerConfig
    from tinker_atropos_math_server.environment import make

    return EnvironmentSpec(
        name="math_server",
        make=make,
        config=MathServerConfig,
        description="competition mathematics; reward 1 for the right answer in \\boxed{}",
    )
