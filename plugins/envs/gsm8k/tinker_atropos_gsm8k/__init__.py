"""Grade-school maths as an environment plugin: GSM8K, GSM-Symbolic, and sums small enough for a 135 M model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_atropos import hookimpl

if TYPE_CHECKING:
    from tinker_atropos import EnvironmentSpec


@hookimpl
def environment_spec() -> EnvironmentSpec:
    """Return the environment `gsm8k`."""
    from tinker_atropos import EnvironmentSpec

    from tinker_atropos_gsm8k.config import Gsm8kConfig
    from tinker_atropos_gsm8k.environment import make

    return EnvironmentSpec(
        name="gsm8k",
        make=make,
        config=Gsm8kConfig,
        description="grade-school maths word problems; reward 1 for the right final answer",
    )
