"""The `env` section of a run with this environment."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from pydantic import ConfigDict, Field
from tinker_atropos.environment import EnvironmentConfig

Vectorization: TypeAlias = Literal["fast", "sync", "async"]
Autoreset: TypeAlias = Literal["same_step", "next_step", "disabled"]
RenderMode: TypeAlias = Literal["rgb_array", "human"]


class GymnasiumConfig(EnvironmentConfig):
    """What the environment `gymnasium` accepts."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    id: str = Field(
        "CartPole-v1", min_length=1, description="a registered Gymnasium id; `module:Id-v0` imports the module first"
    )
    num_envs: int = Field(16, ge=1, description="simulations stepped together")
    vectorization: Vectorization | None = Field(
        None,
        description="fast: all simulations in one native call (the five MuJoCo locomotion tasks, with "
        "tinker-atropos-humanoid); sync: one after the other; async: a worker process each. Unset: fast where it is "
        "possible, else sync",
    )
    threads: int = Field(0, ge=0, description="threads of the fast path; 0: one per core that this process may use")
    make_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="keyword arguments of the environment, such as {gravity: 9.0}"
    )
    max_episode_steps: int | None = Field(
        None, ge=1, description="steps after which an episode is truncated; unset: as registered"
    )
    autoreset: Autoreset = Field(
        "same_step",
        description="same_step: the step that ends an episode returns the next one's first observation, the last one "
        "is in `final_obs`; disabled: the caller resets; next_step, which a run refuses: the step after the end "
        "returns it, and takes no action",
    )
    render_mode: RenderMode | None = Field(
        None,
        description="rgb_array: `render()` gives a frame of each simulation (pictures of an episode set it by "
        "themselves); human: a window each",
    )
