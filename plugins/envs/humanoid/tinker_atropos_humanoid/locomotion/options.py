"""What each task accepts: the keyword arguments of Gymnasium's v5 classes, with their defaults; and how many run."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import ConfigDict, Field
from tinker_atropos.environment import EnvironmentConfig

Bound: TypeAlias = Annotated[float, Field(allow_inf_nan=True)]
Range: TypeAlias = tuple[Bound, Bound]
XML = "MuJoCo model: one of Gymnasium's, or a path that starts with `.`, `/` or `~`"
SKIP = "physics steps per environment step"
CONTROL = "weight of the squared action"
NOISE = "scale of the noise on the initial positions and velocities"
HEIGHT = "height of the torso that is healthy (metres)"
ANGLE = "angle of the torso that is healthy (radians)"

RenderMode: TypeAlias = Literal["rgb_array", "depth_array", "rgbd_tuple"]
Autoreset: TypeAlias = Literal["same_step", "next_step", "disabled"]


class VectorOptions(EnvironmentConfig):
    """How many simulations run, on how many threads, and what happens at the end of an episode."""

    num_envs: int = Field(16, ge=1, description="simulations stepped together")
    threads: int = Field(0, ge=0, description="threads that step them; 0: one per core that this process may use")
    autoreset: Autoreset = Field(
        "same_step",
        description="same_step: the step that ends an episode returns the next one's first observation, the last one "
        "is in `final_obs`; disabled: the caller resets; next_step, which a run refuses: the step after the end "
        "returns it, and takes no action",
    )
    max_episode_steps: int = Field(1000, ge=1, description="steps after which an episode is truncated")
    copy_observations: bool = Field(
        True, description="off: the observations returned are overwritten by the second step after (faster)"
    )


class LocomotionOptions(EnvironmentConfig):
    """What all tasks accept. Ranges may be open; everything else is finite."""

    model_config = ConfigDict(ser_json_inf_nan="constants", allow_inf_nan=False)

    xml_file: str = Field(min_length=1, description=XML)
    frame_skip: int = Field(5, ge=1, description=SKIP)
    forward_reward_weight: float = Field(1.0, description="weight of the velocity along x (metres per second)")
    ctrl_cost_weight: float = Field(0.1, description=CONTROL)
    reset_noise_scale: float = Field(0.1, description=NOISE)
    exclude_current_positions_from_observation: bool = Field(
        True, description="leave the position along x (and y) out of the observation"
    )
    render_mode: RenderMode | None = Field(None, description="what `render()` returns for each simulation")
    width: int = Field(480, ge=1, description="width of a rendered frame in pixels")
    height: int = Field(480, ge=1, description="height of a rendered frame in pixels")
    camera_id: int | None = Field(None, description="camera of the model to render from, by number")
    camera_name: str | None = Field(None, description="camera of the model to render from, by name")
    default_camera_config: dict[str, Any] | None = Field(
        None, description="settings of the free camera (`distance`, `elevation`, …); unset: Gymnasium's for the task"
    )
    max_geom: int = Field(1000, ge=1, description="most geometries in a rendered scene")
    visual_options: dict[int, bool] | None = Field(None, description="MuJoCo's visualisation flags by number")


class HealthyOptions(LocomotionOptions):
    """What tasks accept in which one can fall."""

    healthy_reward: float = Field(1.0, description="reward for each step in a healthy pose")
    terminate_when_unhealthy: bool = Field(True, description="end the episode when the pose is not healthy")
    healthy_z_range: Range = Field((-math.inf, math.inf), description=HEIGHT)


class HalfCheetahOptions(LocomotionOptions):
    """HalfCheetah-v5."""

    xml_file: str = Field("half_cheetah.xml", min_length=1, description=XML)


class HopperOptions(HealthyOptions):
    """Hopper-v5."""

    xml_file: str = Field("hopper.xml", min_length=1, description=XML)
    frame_skip: int = Field(4, ge=1, description=SKIP)
    ctrl_cost_weight: float = Field(1e-3, description=CONTROL)
    healthy_state_range: Range = Field((-100.0, 100.0), description="every other state variable that is healthy")
    healthy_z_range: Range = Field((0.7, math.inf), description=HEIGHT)
    healthy_angle_range: Range = Field((-0.2, 0.2), description=ANGLE)
    reset_noise_scale: float = Field(5e-3, description=NOISE)


class Walker2dOptions(HealthyOptions):
    """Walker2d-v5."""

    xml_file: str = Field("walker2d_v5.xml", min_length=1, description=XML)
    frame_skip: int = Field(4, ge=1, description=SKIP)
    ctrl_cost_weight: float = Field(1e-3, description=CONTROL)
    healthy_z_range: Range = Field((0.8, 2.0), description=HEIGHT)
    healthy_angle_range: Range = Field((-1.0, 1.0), description=ANGLE)
    reset_noise_scale: float = Field(5e-3, description=NOISE)


class AntOptions(HealthyOptions):
    """Ant-v5."""

    xml_file: str = Field("ant.xml", min_length=1, description=XML)
    ctrl_cost_weight: float = Field(0.5, description=CONTROL)
    contact_cost_weight: float = Field(5e-4, description="weight of the squared external contact forces")
    contact_force_range: Range = Field((-1.0, 1.0), description="contact forces are clipped to this range")
    main_body: int | str = Field(1, description="the body whose velocity is rewarded, by number or name")
    healthy_z_range: Range = Field((0.2, 1.0), description=HEIGHT)
    include_cfrc_ext_in_observation: bool = Field(True, description="observe the external contact forces")


class HumanoidOptions(HealthyOptions):
    """Humanoid-v5."""

    xml_file: str = Field("humanoid.xml", min_length=1, description=XML)
    forward_reward_weight: float = Field(1.25, description="weight of the centre of mass's velocity along x (m/s)")
    contact_cost_weight: float = Field(5e-7, description="weight of the squared external contact forces")
    contact_cost_range: Range = Field((-math.inf, 10.0), description="the contact cost is clipped to this range")
    healthy_reward: float = Field(5.0, description="reward for each step in a healthy pose")
    healthy_z_range: Range = Field((1.0, 2.0), description=HEIGHT)
    reset_noise_scale: float = Field(1e-2, description=NOISE)
    include_cinert_in_observation: bool = Field(True, description="observe each body's mass and inertia")
    include_cvel_in_observation: bool = Field(True, description="observe each body's velocity")
    include_qfrc_actuator_in_observation: bool = Field(True, description="observe the actuators' forces")
    include_cfrc_ext_in_observation: bool = Field(
        True, description="observe the external contact forces; off, with contact_cost_weight=0, steps run faster"
    )
