"""The table of tasks: what each observes, what is healthy in it, and which terms it reports. Knows no simulator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinker_atropos_humanoid.locomotion.options import (
    AntOptions,
    HalfCheetahOptions,
    HopperOptions,
    HumanoidOptions,
    LocomotionOptions,
    Range,
    Walker2dOptions,
)

Array: TypeAlias = NDArray[np.float64]
EVERYTHING: Range = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of any task: those that a task does not have are neutral."""

    xml_file: str
    frame_skip: int
    forward_reward_weight: float
    ctrl_cost_weight: float
    reset_noise_scale: float
    exclude_current_positions_from_observation: bool
    contact_cost_weight: float = 0.0
    contact_cost_range: Range = EVERYTHING
    contact_force_range: Range = EVERYTHING
    healthy_reward: float = 0.0
    terminate_when_unhealthy: bool = False
    healthy_z_range: Range = EVERYTHING
    healthy_angle_range: Range = EVERYTHING
    healthy_state_range: Range = EVERYTHING
    main_body: int | str = 1
    include_cinert_in_observation: bool = False
    include_cvel_in_observation: bool = False
    include_qfrc_actuator_in_observation: bool = False
    include_cfrc_ext_in_observation: bool = False

    @classmethod
    def of(cls, options: LocomotionOptions) -> Settings:
        """Return the settings that a task's options give."""
        known = {field.name for field in fields(cls)} & set(type(options).model_fields)
        return cls(**{name: getattr(options, name) for name in known})

    @property
    def needs_contact_forces(self) -> bool:
        """Whether an observation or a reward depends on `cfrc_ext`."""
        return self.include_cfrc_ext_in_observation or self.contact_cost_weight != 0


@dataclass(frozen=True, slots=True)
class Part:
    """A derived field that may be observed, without the first `skip` numbers: the world body's, or the root joint's."""

    field: str
    skip: int

    def included(self, settings: Settings) -> bool:
        """Whether the settings ask for it."""
        return bool(getattr(settings, f"include_{self.field}_in_observation"))


Health: TypeAlias = Callable[[Array, Array, Settings], NDArray[np.bool_]]
"""`(qpos [N, nq], qvel [N, nv], settings)` → which simulations are in a healthy pose, bool[N]."""


@dataclass(frozen=True, slots=True)
class Task:
    """One of Gymnasium's v5 locomotion tasks.

    `planar` ones move along x only; of the others x and y are the plane. `tracked` is what the velocity is measured of;
    `velocity_noise` how initial velocities are drawn; `velocity_bound` clips the velocities observed; `cost_of` whether
    the control cost squares the simulator's controls (float64) or the action in its own precision. `info` lists the
    terms of a step in Gymnasium's order.
    """

    id: str
    options: type[LocomotionOptions]
    camera: Mapping[str, Any]
    planar: bool
    tracked: Literal["root", "body", "mass_center"]
    velocity_noise: Literal["uniform", "normal"]
    info: tuple[str, ...]
    health: Health | None = None
    parts: tuple[Part, ...] = ()
    velocity_bound: float | None = None
    cost_of: Literal["action", "ctrl"] = "action"


def _within(values: Array, bounds: Range) -> NDArray[np.bool_]:
    return np.logical_and(values > bounds[0], values < bounds[1])


def _upright(qpos: Array, qvel: Array, settings: Settings) -> NDArray[np.bool_]:
    return _within(qpos[:, 2], settings.healthy_z_range)


def _off_the_ground(qpos: Array, qvel: Array, settings: Settings) -> NDArray[np.bool_]:
    low, high = settings.healthy_z_range  # inclusive here, as in Gymnasium
    finite = np.isfinite(qpos).all(axis=1) & np.isfinite(qvel).all(axis=1)
    healthy: NDArray[np.bool_] = finite & (qpos[:, 2] >= low) & (qpos[:, 2] <= high)
    return healthy


def _balanced(qpos: Array, qvel: Array, settings: Settings) -> NDArray[np.bool_]:
    return _within(qpos[:, 1], settings.healthy_z_range) & _within(qpos[:, 2], settings.healthy_angle_range)


def _balanced_and_bounded(qpos: Array, qvel: Array, settings: Settings) -> NDArray[np.bool_]:
    bounded = _within(qpos[:, 2:], settings.healthy_state_range).all(axis=1)
    bounded &= _within(qvel, settings.healthy_state_range).all(axis=1)
    healthy: NDArray[np.bool_] = bounded & _balanced(qpos, qvel, settings)
    return healthy


_UPRIGHT_CAMERA = {"trackbodyid": 2, "lookat": (0.0, 0.0, 1.15), "elevation": -20.0}
_PLANAR_INFO = ("x_position", "z_distance_from_origin", "x_velocity", "reward_forward", "reward_ctrl", "reward_survive")

TASKS: Mapping[str, Task] = {
    task.id: task
    for task in (
        Task(
            id="Ant-v5",
            options=AntOptions,
            camera={"distance": 4.0},
            planar=False,
            tracked="body",
            velocity_noise="normal",
            info=(
                *("x_position", "y_position", "distance_from_origin", "x_velocity", "y_velocity"),
                *("reward_forward", "reward_ctrl", "reward_contact", "reward_survive"),
            ),
            health=_off_the_ground,
            parts=(Part("cfrc_ext", 6),),
        ),
        Task(
            id="HalfCheetah-v5",
            options=HalfCheetahOptions,
            camera={"distance": 4.0},
            planar=True,
            tracked="root",
            velocity_noise="normal",
            info=("x_position", "x_velocity", "reward_forward", "reward_ctrl"),
        ),
        Task(
            id="Hopper-v5",
            options=HopperOptions,
            camera={**_UPRIGHT_CAMERA, "distance": 3.0},
            planar=True,
            tracked="root",
            velocity_noise="uniform",
            info=_PLANAR_INFO,
            health=_balanced_and_bounded,
            velocity_bound=10.0,
        ),
        Task(
            id="Humanoid-v5",
            options=HumanoidOptions,
            camera={"trackbodyid": 1, "distance": 4.0, "lookat": (0.0, 0.0, 2.0), "elevation": -20.0},
            planar=False,
            tracked="mass_center",
            velocity_noise="uniform",
            info=(
                *("x_position", "y_position", "tendon_length", "tendon_velocity", "distance_from_origin"),
                *("x_velocity", "y_velocity", "reward_survive", "reward_forward", "reward_ctrl", "reward_contact"),
            ),
            health=_upright,
            parts=(Part("cinert", 10), Part("cvel", 6), Part("qfrc_actuator", 6), Part("cfrc_ext", 6)),
            cost_of="ctrl",
        ),
        Task(
            id="Walker2d-v5",
            options=Walker2dOptions,
            camera={**_UPRIGHT_CAMERA, "distance": 4.0},
            planar=True,
            tracked="root",
            velocity_noise="uniform",
            info=_PLANAR_INFO,
            health=_balanced,
            velocity_bound=10.0,
        ),
    )
}
