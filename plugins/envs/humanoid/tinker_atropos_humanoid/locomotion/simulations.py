"""N simulations of one MuJoCo model, stepped in one native call. Knows no task, no reward and no episode."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeAlias

import mujoco
import numpy as np
from mujoco.batch import Batch, SimulationError
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float64]
Ids: TypeAlias = NDArray[np.intp] | None
"""Numbers of simulations, ascending; None: all."""

UNSTABLE = slice(int(mujoco.mjtWarning.mjWARN_BADQPOS), int(mujoco.mjtWarning.mjWARN_BADQACC) + 1)
FEW = 4  # simulations whose forward pass (17 µs each) is over before the other threads have woken up
NO_STAGE = int(mujoco.mjtStage.mjSTAGE_NONE)


def load_model(xml_file: str, width: int, height: int) -> mujoco.MjModel:
    """Load a model as Gymnasium does: one of its own by name, or a path; frames of this size will fit its buffer."""
    from gymnasium.envs.mujoco.mujoco_env import expand_model_path
    from tinker_atropos.errors import ConfigError

    try:
        model = mujoco.MjModel.from_xml_path(expand_model_path(xml_file))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"xml_file: {xml_file!r} can't be loaded: {error}; give the name of one of Gymnasium's models "
            "(`humanoid.xml`), or a path that starts with `./`, `/` or `~`"
        ) from error
    model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
    model.vis.global_.offheight = max(model.vis.global_.offheight, height)
    return model


class Simulations:
    """The physics. `qpos`, `qvel` and `ctrl` are live views of the state; `field(name)` gives derived ones.

    As in Gymnasium after `mj_step`, derived fields describe the last stage of the integrator, not the state it gave.
    `contact_forces float64[N, bodies, 6]` is `cfrc_ext` as Gymnasium has it: computed after the step, zero after a
    reset.
    """

    def __init__(self, model: mujoco.MjModel, count: int, threads: int, *, contact_forces: bool) -> None:
        self.model = model
        # Only a persistent batch keeps what `mj_rnePostConstraint` needs, such as the contacts, for each simulation.
        self._batch = Batch(model, count, min(threads or cores(), count), persistent=contact_forces)
        self.qpos: Array = self._batch.bind("qpos")
        self.qvel: Array = self._batch.bind("qvel")
        self.ctrl: Array = self._batch.bind("ctrl")
        self.contact_forces: Array = np.zeros((count, model.nbody, 6))
        self._exact_forces = contact_forces
        # Without a contact, a constraint between bodies or a force applied from outside, `cfrc_ext` is zero.
        self._contacts: NDArray[np.int32] | None = self._batch.bind("ncon") if model.neq == 0 else None
        self._scratch = mujoco.MjData(model)
        self._scratch_forces = self._scratch.cfrc_ext
        self._unstable = self._batch.warning[:, UNSTABLE, 1]
        self._broken: Sequence[int] = ()
        self._batch.reset(stage=NO_STAGE)
        self._start: Array = self._batch.state[0].copy()

    @property
    def threads(self) -> int:
        """Threads that step the simulations, this one included."""
        return int(self._batch.nthread)

    def field(self, name: str) -> Array:
        """Return a field of MjData for all simulations, [N, …]: refreshed by every call, not to be written to."""
        values: Array = self._batch.bind(name)
        return values

    def step(self, substeps: int, ids: Ids = None) -> None:
        """Advance by `substeps` physics steps under the controls in `ctrl`."""
        self._broken = ()
        try:
            self._batch.step(ids, substeps)
        except SimulationError as error:  # those keep their state, the others went on
            self._broken = error.ids.tolist()
        if self._exact_forces:
            self._compute_forces(ids)

    def _compute_forces(self, ids: Ids) -> None:
        """Do what Gymnasium does after a step; the only work per simulation in Python, about 7 µs for each."""
        if self._contacts is not None:
            self.contact_forces[...] = 0.0
            touching = self._contacts.nonzero()[0]
            ids = touching if ids is None else np.intersect1d(touching, ids, assume_unique=True)
        get_data, scratch, forces, to = self._batch.get_data, self._scratch, self._scratch_forces, self.contact_forces
        model, post_constraint = self.model, mujoco.mj_rnePostConstraint
        for index in range(len(to)) if ids is None else ids.tolist():
            get_data(index, scratch)
            post_constraint(model, scratch)
            to[index] = forces

    def reset(self, ids: NDArray[np.intp], qpos: Array, qvel: Array) -> None:
        """Put simulations at rest in the model's initial state, then at `qpos [K, nq]` and `qvel [K, nv]`."""
        if self._unstable.any():
            self._batch.reset(ids, stage=NO_STAGE)  # clears the warnings; else the row alone says all, and is quicker
        self._batch.state[ids] = self._start
        self.qpos[ids] = qpos
        self.qvel[ids] = qvel
        if len(ids) > FEW:
            self._batch.forward(ids)
        else:
            for one in ids[:, None]:
                self._batch.forward(one)
        self.contact_forces[ids] = 0.0

    def unstable(self) -> NDArray[np.bool_] | None:
        """Return which simulations the last step broke, bool[N]: MuJoCo put them back to the start; None: none."""
        if not self._broken and not self._unstable.any():
            return None
        unstable: NDArray[np.bool_] = self._unstable.any(axis=1)
        unstable[list(self._broken)] = True
        return unstable

    def state(self) -> Array:
        """Return a copy of all that determines the further course, [N, size]: MuJoCo's mjSTATE_INTEGRATION."""
        return np.array(self._batch.state)

    def set_state(self, state: Array) -> None:
        """Continue from what `state` returned; derived fields are those of the next step."""
        self._batch.reset(stage=NO_STAGE)
        self._batch.state[...] = state

    def data(self, index: int, into: mujoco.MjData) -> None:
        """Copy one simulation, with its derived fields."""
        self._batch.get_data(index, into)
        if not self._exact_forces:
            mujoco.mj_forward(self.model, into)


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
