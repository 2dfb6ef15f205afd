"""The reward of a step, its terms, and what else Gymnasium reports of it. Bit-equal to Gymnasium's arithmetic."""

from __future__ import annotations

from typing import Any, TypeAlias

import mujoco
import numpy as np
from numpy.typing import NDArray

from tinker_atropos_humanoid.locomotion.simulations import Simulations
from tinker_atropos_humanoid.locomotion.tasks import Settings, Task

Array: TypeAlias = NDArray[np.float64]
Terms: TypeAlias = dict[str, NDArray[Any]]

STATE_TERMS = frozenset(
    ("x_position", "y_position", "z_distance_from_origin", "tendon_length", "tendon_velocity", "distance_from_origin")
)


class Tracker:
    """Measures where a simulation is: its root, a body, or its centre of mass; float64[N, 1 or 2], in metres."""

    def __init__(self, task: Task, settings: Settings, simulations: Simulations) -> None:
        model = simulations.model
        self._weights: Array | None = None
        if task.tracked == "root":
            self._source = simulations.qpos[:, : 1 if task.planar else 2]
        elif task.tracked == "body":
            self._source = simulations.field("xpos")[:, body_id(model, settings.main_body), :2]
        else:
            self._source = simulations.field("xipos")
            self._weights, self._mass = model.body_mass, model.body_mass.sum()

    def positions(self) -> Array:
        """Return the positions, as a new array."""
        if self._weights is None:
            return np.array(self._source)
        # einsum, and over all three axes: other orders of summation differ in the last bit from Gymnasium's
        positions: Array = (np.einsum("b,nbj->nj", self._weights, self._source) / self._mass)[:, :2]
        return positions


def body_id(model: mujoco.MjModel, body: int | str) -> int:
    """Return the number of a body; raises `ConfigError` if the model has none of that name or number."""
    from tinker_atropos.errors import ConfigError, near

    names = [model.body(number).name for number in range(model.nbody)]
    if isinstance(body, str) and body in names:
        return names.index(body)
    if isinstance(body, int) and 0 <= body < model.nbody:
        return body
    raise ConfigError(
        f"main_body: the model has no body {body!r}.{near(str(body), names)} It has {', '.join(filter(None, names))}, "
        f"or give a number below {model.nbody}"
    )


class Rewarder:
    """Computes terms and rewards of all simulations at once."""

    def __init__(self, task: Task, settings: Settings, simulations: Simulations, forces: Array) -> None:
        self._task = task
        self._settings = settings
        self._qpos, self._qvel, self._ctrl = simulations.qpos, simulations.qvel, simulations.ctrl
        self._forces = forces.reshape(len(forces), -1)
        self._squares = np.zeros_like(self._forces)
        self._dt = simulations.model.opt.timestep * settings.frame_skip
        self._start_height = float(simulations.model.qpos0[1])
        self._state_terms = tuple(name for name in task.info if name in STATE_TERMS)
        self._tendons = {
            name: simulations.field(field)
            for name, field in (("tendon_length", "ten_length"), ("tendon_velocity", "ten_velocity"))
            if name in task.info
        }
        self._has_contacts = "reward_contact" in task.info
        low, high = settings.contact_cost_range
        self._no_contact: Array | None = None
        if not settings.needs_contact_forces:  # then all forces stay 0
            self._no_contact = np.full(len(forces), min(max(0.0, low), high))

    def state_terms(self) -> Terms:
        """Return the terms that describe a state, new arrays [N, …]; a reset reports these alone."""
        return {name: self._state_term(name) for name in self._state_terms}

    def step_terms(
        self, before: Array, after: Array, actions: NDArray[Any], healthy: NDArray[np.bool_] | None
    ) -> Terms:
        """Return the other terms of a step and, as `reward`, the rewards [N].

        `before` and `after` are the tracked positions, `healthy` bool[N], None for a task that has no such thing.
        """
        settings = self._settings
        velocity = (after - before) / self._dt
        forward = settings.forward_reward_weight * velocity[:, 0]
        squared = np.square(self._ctrl if self._task.cost_of == "ctrl" else actions)
        cost: Any = settings.ctrl_cost_weight * np.add.reduce(squared, axis=1)
        terms: Terms = {"x_velocity": velocity[:, 0], "reward_forward": forward, "reward_ctrl": -cost}
        gain = forward
        if not self._task.planar:
            terms["y_velocity"] = velocity[:, 1]
        if healthy is not None:
            survive = terms["reward_survive"] = healthy * settings.healthy_reward
            gain = forward + survive
        if self._has_contacts:
            contact = self._contact_cost()
            terms["reward_contact"] = -contact
            cost = cost + contact
        terms["reward"] = gain - cost
        return terms

    def healthy(self) -> NDArray[np.bool_] | None:
        """Return which simulations are in a healthy pose."""
        return None if self._task.health is None else self._task.health(self._qpos, self._qvel, self._settings)

    def _contact_cost(self) -> Array:
        if self._no_contact is not None:
            return self._no_contact
        np.square(self._forces, out=self._squares)
        cost = self._settings.contact_cost_weight * np.add.reduce(self._squares, axis=1)
        low, high = self._settings.contact_cost_range
        clipped: Array = np.minimum(np.maximum(cost, low), high)
        return clipped

    def _state_term(self, name: str) -> NDArray[Any]:
        values: NDArray[Any]
        if name == "x_position":
            values = self._qpos[:, 0].copy()
        elif name == "y_position":
            values = self._qpos[:, 1].copy()
        elif name == "z_distance_from_origin":
            values = self._qpos[:, 1] - self._start_height
        elif name == "distance_from_origin":
            plane = self._qpos[:, :2]
            values = np.sqrt(np.vecdot(plane, plane))  # as np.linalg.norm's dot product, which may fuse operations
        else:
            values = self._tendons[name].copy()
        return values
