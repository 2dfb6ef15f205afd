"""The vector environment: actions in, observations, rewards and episode ends out. Knows tasks only by their table.

Equal, bit for bit, to `gymnasium.make_vec(id, num_envs, vectorization_mode="sync")`, but in what it does about a NaN.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray
from tinker_atropos.errors import RunError

from tinker_atropos_humanoid.locomotion import snapshots
from tinker_atropos_humanoid.locomotion.faults import FaultCounter, first_not_finite, not_finite
from tinker_atropos_humanoid.locomotion.infos import blank, excluding, gather, only, without_state
from tinker_atropos_humanoid.locomotion.observation import Observer
from tinker_atropos_humanoid.locomotion.options import LocomotionOptions, VectorOptions
from tinker_atropos_humanoid.locomotion.random_states import RandomStates
from tinker_atropos_humanoid.locomotion.rendering import Renderer
from tinker_atropos_humanoid.locomotion.simulations import Simulations, load_model
from tinker_atropos_humanoid.locomotion.tasks import Settings, Task
from tinker_atropos_humanoid.locomotion.terms import STATE_TERMS, Rewarder, Terms, Tracker

Array: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Rows: TypeAlias = NDArray[np.intp]
Stepped: TypeAlias = tuple[Array, Array, Mask, Mask, dict[str, Any]]

AUTORESET = {
    "same_step": AutoresetMode.SAME_STEP,
    "next_step": AutoresetMode.NEXT_STEP,
    "disabled": AutoresetMode.DISABLED,
}
UNSTABLE = "the physics became unstable (an infinite or huge position, velocity or acceleration)"


class LocomotionVectorEnv(VectorEnv[Array, NDArray[Any], NDArray[Any]]):
    """N simulations of a locomotion task; observations float64[N, D], actions float32[N, A].

    A NaN or infinite action, or physics that it broke, truncates that simulation's episode with reward 0 and the
    observation before it (`infos["fault"]`), resets the simulation and is counted. `snapshot` and `restore` continue
    exactly where a run was.
    """

    def __init__(self, task: Task, options: LocomotionOptions, vector: VectorOptions) -> None:
        super().__init__()
        settings = Settings.of(options)
        model = load_model(options.xml_file, options.width, options.height)
        self.task = task
        self.num_envs = count = vector.num_envs
        self.simulations = Simulations(model, count, vector.threads, contact_forces=settings.needs_contact_forces)
        self._settings = settings
        self._mode = AUTORESET[vector.autoreset]
        self._limit = vector.max_episode_steps
        self._copy = vector.copy_observations
        self._observer = Observer(task, settings, self.simulations)
        self._tracker = Tracker(task, settings, self.simulations)
        self._rewarder = Rewarder(task, settings, self.simulations, self._observer.forces)
        self._renderer = Renderer(self.simulations, options, task.camera)
        self._random = RandomStates(count)
        self._faults = FaultCounter(task.id, count)
        self._everyone = np.arange(count)
        self._positions = self._tracker.positions()
        self._elapsed = np.zeros(count, np.int64)
        self._pending = np.zeros(count, np.bool_)
        self._steps = 0
        self._was_reset = False
        self._describe(options)

    def _describe(self, options: LocomotionOptions) -> None:
        model = self.simulations.model
        self.spec = copy.deepcopy(gymnasium.spec(self.task.id))
        self.spec.max_episode_steps = self._limit
        self.spec.kwargs = options.model_dump(include=set(self.task.options.model_fields), exclude_unset=True)
        low, high = model.actuator_ctrlrange.astype(np.float32).T
        self.single_action_space = spaces.Box(low, high, dtype=np.float32)
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (self._observer.size,), np.float64)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.render_mode = options.render_mode
        self.metadata = {
            "render_modes": ["rgb_array", "depth_array", "rgbd_tuple"],
            "render_fps": round(1.0 / (model.opt.timestep * self._settings.frame_skip)),
            "autoreset_mode": self._mode,
        }

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator of each simulation, as in Gymnasium's SyncVectorEnv."""
        return tuple(self._random.generators)

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each simulation; -1 where a snapshot was restored."""
        return tuple(self._random.seeds)

    @property
    def faults(self) -> NDArray[np.int64]:
        """How often each simulation was reset for a fault, int64[N]."""
        return self._faults.counts.copy()

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Begin new episodes: of all simulations, or of those that are true in `options["reset_mask"]` (bool[N])."""
        mask = _reset_mask(options, self.num_envs)
        if mask is None:
            self._random.seed(seed)
            self._restart(self._everyone)
            self._observer.write()
            self._was_reset = True
        else:
            self._require_reset()
            self._random.seed(seed, mask)
            self._restart(np.flatnonzero(mask))
            self._observer.refresh(mask)
        terms = self._rewarder.state_terms()
        if mask is not None:
            blank(terms, ~mask)
        return self._given_out(), self._infos(terms, mask, mask)

    def step(self, actions: NDArray[Any]) -> Stepped:
        """Take one action in each simulation; raises `RunError` for a wrong shape."""
        self._require_reset()
        self._steps += 1
        actions = self._checked(actions)
        pending = self._pending.copy() if self._pending.any() else None
        if pending is not None and self._mode is AutoresetMode.DISABLED:
            raise RunError(
                f"simulations {np.flatnonzero(pending).tolist()} have ended their episodes; with autoreset 'disabled' "
                "call reset(options={'reset_mask': terminated | truncated}) first"
            )
        bad_actions = not_finite(actions)
        self.simulations.ctrl[...] = actions if bad_actions is None else np.where(bad_actions[:, None], 0, actions)

        before = self._positions
        self.simulations.step(self._settings.frame_skip, None if pending is None else np.flatnonzero(~pending))
        self._elapsed += 1
        if pending is not None:
            self._restart(np.flatnonzero(pending))
        self._positions = after = self._tracker.positions()
        self._observer.write()

        healthy = self._rewarder.healthy()
        terms = self._rewarder.step_terms(before, after, actions, healthy)
        rewards: Array = terms.pop("reward")
        terms |= self._rewarder.state_terms()
        if healthy is None or not self._settings.terminate_when_unhealthy:
            terminated = np.zeros(self.num_envs, np.bool_)
        else:
            terminated = ~healthy
        truncated = self._elapsed >= self._limit

        fresh = None
        if pending is not None:  # those were reset in place of a step
            fresh = pending
            rewards[fresh] = 0.0
            terminated[fresh] = truncated[fresh] = False
            blank(terms, fresh, but=STATE_TERMS)
        faulty = self._faulty(bad_actions, actions, rewards, fresh)
        if faulty is not None:
            self._observer.current[faulty] = self._observer.previous[faulty]
            rewards[faulty] = 0.0
            terminated[faulty], truncated[faulty] = False, True
            blank(terms, faulty)
        infos = self._finish(terms, terminated | truncated, fresh, faulty)
        return self._given_out(), rewards, terminated, truncated, infos

    def _finish(self, terms: Terms, done: Mask, fresh: Mask | None, faulty: Mask | None) -> dict[str, Any]:
        """Reset what ended, as the autoreset mode says, and return the infos."""
        if self._mode is not AutoresetMode.SAME_STEP:
            self._pending = done
            infos = self._infos(terms, excluding(fresh, faulty), excluding(faulty))
        elif not done.any():
            infos = self._infos(terms, None, None)
        else:
            rows = np.flatnonzero(done)
            finals = np.full(self.num_envs, None, dtype=object)
            for row in rows.tolist():
                finals[row] = self._observer.current[row].copy()
            ended = done if faulty is None else done & ~faulty
            last = self._infos(only(terms, ended), ended, ended)
            self._restart(rows)
            self._observer.refresh()
            going_on = ~done
            terms = only(without_state(terms), going_on) | self._rewarder.state_terms()
            infos = {"final_obs": finals, "_final_obs": done, "final_info": last, "_final_info": done}
            infos |= self._infos(terms, going_on, None)
        if faulty is not None:
            infos["fault"] = infos["_fault"] = faulty
        return infos

    def _restart(self, rows: Rows) -> None:
        """Begin a new episode in some simulations, drawing from their generators in Gymnasium's order."""
        model, scale = self.simulations.model, self._settings.reset_noise_scale
        qpos, qvel = self._random.draw(rows, (model.nq, model.nv), scale, self.task.velocity_noise)
        self.simulations.reset(rows, model.qpos0 + qpos, qvel)
        self._elapsed[rows] = 0
        self._pending[rows] = False
        if len(rows) == self.num_envs:
            self._positions = self._tracker.positions()
        else:
            self._positions[rows] = self._tracker.positions()[rows]

    def _faulty(
        self, bad_actions: Mask | None, actions: NDArray[Any], rewards: Array, fresh: Mask | None
    ) -> Mask | None:
        """Return which simulations can't be used after this step, bool[N], and count them; None: all can."""
        checked = {"action": actions, "observation": self._observer.current, "reward": rewards[:, None]}
        bad = {
            "action": bad_actions,
            "observation": not_finite(checked["observation"]),
            "reward": not_finite(checked["reward"]),
        }
        found = [mask for mask in (*bad.values(), self.simulations.unstable()) if mask is not None]
        if not found:
            return None
        faulty: Mask = np.logical_or.reduce(found)
        if fresh is not None:
            faulty &= ~fresh  # the action was not used, and a reset can't go wrong
        for row in np.flatnonzero(faulty).tolist():
            name = next((name for name, mask in bad.items() if mask is not None and mask[row]), None)
            what = UNSTABLE if name is None else first_not_finite(name, checked[name][row])
            self._faults.add(row, self._steps, what)
        return faulty if faulty.any() else None

    def _checked(self, actions: NDArray[Any]) -> NDArray[Any]:
        actions = np.asarray(actions)
        if actions.shape != self.simulations.ctrl.shape:
            raise RunError(
                f"{self.task.id}: the actions have shape {actions.shape}; {self.num_envs} simulations of a task with "
                f"{self.simulations.model.nu} actuators need {self.simulations.ctrl.shape}"
            )
        return actions

    def _require_reset(self) -> None:
        if not self._was_reset:
            raise RunError(f"{self.task.id}: call reset() before the first step")

    def _given_out(self) -> Array:
        return self._observer.current.copy() if self._copy else self._observer.current

    def _infos(self, terms: Terms, stepped: Mask | None, stated: Mask | None) -> dict[str, Any]:
        return gather(self.task.info, terms, stepped, stated, self.num_envs)

    def snapshot(self) -> dict[str, NDArray[Any]]:
        """Return all that the further course depends on: physics, generators, episode lengths, last observations."""
        self._require_reset()
        return snapshots.pack(
            self.task.id,
            state=self.simulations.state(),
            random=self._random.snapshot(),
            positions=self._positions,
            observations=self._observer.current,
            elapsed=self._elapsed,
            pending=self._pending,
            faults=self._faults.counts,
            steps=np.array(self._steps),
        )

    def restore(self, snapshot: Mapping[str, NDArray[Any]]) -> Array:
        """Continue from a snapshot, bit for bit; return the observations it was taken after, [N, D].

        Raises `CheckpointError` for the snapshot of another task, other options or another number of simulations.
        """
        like = {"state": self.simulations.state(), "observations": self._observer.current, "positions": self._positions}
        values = snapshots.unpack(self.task.id, snapshot, like)
        self.simulations.set_state(values["state"])
        self._random.restore(values["random"])
        self._positions = np.array(values["positions"])
        self._observer.current[...] = values["observations"]
        self._elapsed[...] = values["elapsed"]
        self._pending = np.array(values["pending"])
        self._faults.counts[...] = values["faults"]
        self._steps = int(values["steps"])
        self._was_reset = True
        return self._given_out()

    def render(self) -> tuple[Any, ...] | None:
        """Return a frame of every simulation in `render_mode`."""
        if self.render_mode is None:
            raise RunError("render() needs env.render_mode; set it to rgb_array, or call render_simulation(index)")
        return tuple(self.render_simulation(index, self.render_mode) for index in range(self.num_envs))

    def render_simulation(self, index: int = 0, mode: str = "rgb_array") -> Any:
        """Return a frame of one simulation, uint8[height, width, 3]; raises `RunError` where OpenGL is missing."""
        if mode not in self.metadata["render_modes"]:
            raise RunError(f"render mode {mode!r} is none of {', '.join(self.metadata['render_modes'])}")
        if not 0 <= index < self.num_envs:
            raise RunError(f"there is no simulation {index} to render, they are 0 to {self.num_envs - 1}")
        return self._renderer.frame(index, mode)  # type: ignore[arg-type]

    def close_extras(self, **kwargs: Any) -> None:
        """Free the OpenGL context."""
        self._renderer.close()


def _reset_mask(options: Mapping[str, Any] | None, count: int) -> Mask | None:
    mask = (options or {}).get("reset_mask")
    if mask is None:
        return None
    if not isinstance(mask, np.ndarray) or mask.shape != (count,) or mask.dtype != np.bool_ or not mask.any():
        raise RunError(
            f"options['reset_mask'] is {mask!r:.80}; expected a bool array of shape ({count},), not all false"
        )
    return mask
