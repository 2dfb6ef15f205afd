"""Lays out an observation: which numbers of the simulations go where. Writes them for all simulations at once."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinker_atropos_humanoid.locomotion.simulations import Simulations
from tinker_atropos_humanoid.locomotion.tasks import Settings, Task

Array: TypeAlias = NDArray[np.float64]


class Observer:
    """Writes observations into one of two buffers in turn, so that the last one is still there when one goes wrong.

    `current float64[N, D]` is the observation written last, `previous` the one before.
    """

    def __init__(self, task: Task, settings: Settings, simulations: Simulations) -> None:
        count = len(simulations.qpos)
        self._bound = task.velocity_bound
        self._range = settings.contact_force_range
        self._clip_forces = any(math.isfinite(bound) for bound in self._range)
        self._raw_forces = simulations.contact_forces
        self.forces: Array = np.zeros_like(self._raw_forces) if self._clip_forces else self._raw_forces
        skipped = (1 if task.planar else 2) if settings.exclude_current_positions_from_observation else 0
        velocities = simulations.qvel
        if self._bound is not None:
            velocities = np.zeros_like(velocities)
        self._raw_velocities, self._velocities = simulations.qvel, velocities
        sources = [simulations.qpos[:, skipped:], velocities]
        for part in task.parts:
            if part.included(settings):
                field = self.forces if part.field == "cfrc_ext" else simulations.field(part.field)
                sources.append(field.reshape(count, -1)[:, part.skip :])
        ends = np.cumsum([source.shape[1] for source in sources]).tolist()
        self.size: int = ends[-1]
        slices = [slice(end - source.shape[1], end) for source, end in zip(sources, ends, strict=True)]
        buffers = [np.zeros((count, self.size)) for _ in range(2)]
        self._pairs = [
            [(buffer[:, to], source) for to, source in zip(slices, sources, strict=True)] for buffer in buffers
        ]
        self.current, self.previous = buffers

    def write(self) -> None:
        """Observe all simulations; what was current is previous from then on."""
        self.current, self.previous = self.previous, self.current
        self._pairs.reverse()
        self.refresh()

    def refresh(self, mask: NDArray[np.bool_] | None = None) -> None:
        """Observe again in place, after resets; `mask bool[N]`: only those, the others keep what was observed."""
        if self._bound is not None:
            np.clip(self._raw_velocities, -self._bound, self._bound, out=self._velocities)
        if self._clip_forces:
            np.clip(self._raw_forces, *self._range, out=self.forces)
        for to, source in self._pairs[0]:
            np.copyto(to, source, where=True if mask is None else mask[:, None])
