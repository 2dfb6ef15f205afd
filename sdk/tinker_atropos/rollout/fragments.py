"""One shard's side of collection: steps it under a policy and writes what happens into preallocated arrays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinker_atropos.control import ControlPolicy, ControlSpaces, Fragment
from tinker_atropos.errors import RunError, TrainerError
from tinker_atropos.rollout.schedule import derive_seed
from tinker_atropos.rollout.shards import Shard
from tinker_atropos.rollout.simulations import CAUSES, Shape, is_discrete
from tinker_atropos.trajectory import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The arrays of one fragment, as `Fragment` has them, for at most T steps."""

    observations: FloatArray
    actions: NDArray[Any]
    logprobs: FloatArray
    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray

    @staticmethod
    def made(shape: Shape, steps: int) -> Buffers:
        """Return arrays for `steps` steps."""
        rows = (steps, shape.num_envs)
        return Buffers(
            observations=np.zeros((steps + 1, shape.num_envs, *shape.observation), np.float32),
            actions=np.zeros(rows + shape.action, shape.action_type),
            logprobs=np.zeros(rows, np.float32),
            rewards=np.zeros(rows, np.float32),
            terminated=np.zeros(rows, np.bool_),
            truncated=np.zeros(rows, np.bool_),
        )


class Actor:
    """Chooses actions: asks the policy, checks its answer, and brings it into the bounds of the space."""

    def __init__(self, spaces: ControlSpaces, lock: threading.Lock) -> None:
        self._lock, space = lock, spaces.action
        self.discrete = is_discrete(space)
        self._start, self._n = (int(space.start), int(space.n)) if self.discrete else (0, 0)
        self._low: Any
        self._high: Any
        self._low, self._high = (0, 0) if self.discrete else (space.low, space.high)

    def choose(
        self,
        policy: ControlPolicy,
        observations: FloatArray,
        rng: np.random.Generator | None,
        actions: NDArray[Any],
        logprobs: FloatArray,
    ) -> BoolArray | None:
        """Write the policy's actions and log-probabilities; return where an action is no number, None if nowhere."""
        with self._lock:
            acted = policy.act(observations, rng)
            if acted.actions.shape != actions.shape or acted.logprobs.shape != logprobs.shape:
                raise TrainerError(
                    f"the policy of step {policy.ref.step} gave actions of shape {acted.actions.shape} and logprobs of "
                    f"shape {acted.logprobs.shape} for {len(observations)} observations; expected {actions.shape} and "
                    f"{logprobs.shape}"
                )
            actions[...] = acted.actions
            logprobs[...] = acted.logprobs
        if self.discrete:
            if not np.isfinite(logprobs).all():  # of NaN logits, which an action can't show
                raise TrainerError(
                    f"the policy of step {policy.ref.step} gave a NaN or infinite log-probability; lower the learning "
                    "rate, then continue from the last checkpoint with --resume"
                )
            if ((actions < 0) | (actions >= self._n)).any():
                raise TrainerError(
                    f"the policy of step {policy.ref.step} gave the actions {actions.tolist()}; expected 0 to "
                    f"{self._n - 1}"
                )
            return None
        if np.isfinite(actions).all() and np.isfinite(logprobs).all():
            return None
        bad: BoolArray = ~(np.isfinite(actions).all(axis=1) & np.isfinite(logprobs))
        return bad

    def to_space(self, actions: NDArray[Any], out: NDArray[Any]) -> None:
        """Write actions as the simulator takes them: clipped to the box, or counted from the space's `start`."""
        if self.discrete:
            np.add(actions, self._start, out=out)
        else:
            np.clip(actions, self._low, self._high, out=out)


class Broken:
    """Counts simulations that had to be reset for a NaN, says which, and ends the run when they are too many."""

    def __init__(self, say: Callable[[str], None], most: int, task: str) -> None:
        self._say, self._most, self._task = say, most, task
        self.count = 0

    def add(self, simulation: int, step: int, cause: str) -> None:
        """Note one; raises `RunError` past `rollout.max_broken_episodes`."""
        self.count += 1
        said = f"{self._task}: simulation {simulation} met {cause} in its step {step}"
        if self.count > self._most:
            raise RunError(
                f"{said}; these are {self.count}, more than rollout.max_broken_episodes={self._most}. Look for the "
                "cause in the environment, lower the learning rate, or allow more; then continue with --resume"
            )
        if self.count <= 8 or self.count & (self.count - 1) == 0:
            self._say(f"{said}: reset, its episode is cut off there ({self.count} so far)")


class Lane:
    """One shard, its episodes under way, and the fragment it is filling."""

    def __init__(self, index: int, shard: Shard, shape: Shape, actor: Actor, broken: Broken, length: int) -> None:
        self.index, self.shard, self.length = index, shard, length
        self._shape, self._actor, self._broken = shape, actor, broken
        self._free: list[Buffers] = []
        self._lent: dict[str, Buffers] = {}
        self.num_envs = n = shape.num_envs
        self.returns, self.lengths = np.zeros(n, np.float64), np.zeros(n, np.int64)
        self._fresh = np.ones(n, np.bool_)
        self.steps_taken = 0
        self.restarts = self.restarts_in_a_row = 0
        self.owed = 0  # steps missing of a fragment that its lost shard cut off
        self.starting = False
        self.filling = False

    def reset(self, seed: int, first_step: int) -> None:
        """Begin new episodes; `finish_reset` waits for them. `seed` and `first_step` decide all that is random."""
        self.rng = np.random.default_rng(derive_seed(seed, "actions", self.index, first_step, self.restarts))
        self.returns[:], self.lengths[:], self._fresh[:] = 0.0, 0, True
        self.shard.start("reset", derive_seed(seed, "simulations", self.index, first_step, self.restarts))
        self.starting = True

    def finish_reset(self) -> None:
        """Wait for the new episodes."""
        self.shard.finish()
        self.starting = False

    def begin(self, fragment: str, ordinal: int, policy: ControlPolicy, steps: int) -> None:
        """Begin a fragment of `steps` steps."""
        self.id, self.ordinal, self.policy, self.steps = fragment, ordinal, policy, steps
        self.buffers = self._free.pop() if self._free else Buffers.made(self._shape, self.length)
        self.buffers.observations[0] = self.shard.arrays.observations
        self._finals: list[tuple[int, int, FloatArray]] = []
        self._episodes: list[tuple[float, int]] = []
        self.t = 0
        self.filling = True

    @property
    def full(self) -> bool:
        """Whether the fragment has all its steps."""
        return self.t == self.steps

    def send(self) -> None:
        """Choose actions for the newest observations and let the simulations take them."""
        t, buffers = self.t, self.buffers
        bad = self._choose(t)
        if bad is not None:
            self._replace(t, bad)
            if self._choose(t) is not None:
                raise TrainerError(
                    f"the policy of step {self.policy.ref.step} gives NaN actions for fresh episodes too; lower the "
                    "learning rate, then continue from the last checkpoint with --resume"
                )
        self._actor.to_space(buffers.actions[t], self.shard.arrays.actions)
        self.shard.start("step")

    def receive(self) -> None:
        """Wait for the step and note it; raises `ShardLost`."""
        self.shard.finish()
        arrays, buffers, t = self.shard.arrays, self.buffers, self.t
        buffers.observations[t + 1] = arrays.observations
        buffers.rewards[t] = arrays.rewards
        buffers.terminated[t], buffers.truncated[t] = arrays.terminated, arrays.truncated
        self.returns += arrays.rewards
        self.lengths += 1
        self.t = t + 1
        self.steps_taken += 1
        ended = arrays.terminated | arrays.truncated
        if ended.any():
            self._end(t, np.flatnonzero(ended))

    def fragment(self, lost: bool = False) -> Fragment:
        """Return what was collected; with `lost` all that the lost shard had done, truncated there."""
        t, buffers = self.t, self.buffers
        if lost:
            for n in np.flatnonzero(~(buffers.terminated[t - 1] | buffers.truncated[t - 1])):
                buffers.truncated[t - 1, n] = True
                self._finals.append((t - 1, int(n), buffers.observations[t, n].copy()))
        self._finals.sort(key=lambda final: final[:2])
        self.filling = False
        self._lent[self.id] = buffers
        return Fragment(
            id=self.id,
            observations=buffers.observations[: t + 1],
            actions=buffers.actions[:t],
            logprobs=buffers.logprobs[:t],
            rewards=buffers.rewards[:t],
            terminated=buffers.terminated[:t],
            truncated=buffers.truncated[:t],
            finals=np.array([row for *_, row in self._finals], np.float32).reshape(-1, *self._shape.observation),
            policy=self.policy.ref,
            episodes=tuple(self._episodes),
            lost=np.ones(self._shape.num_envs, np.bool_) if lost else None,
            shard=self.index,
            fresh=self._take_fresh(),
        )

    def _take_fresh(self) -> BoolArray | None:
        fresh, self._fresh = self._fresh, np.zeros_like(self._fresh)
        return fresh if fresh.any() else None

    def abandon(self) -> None:
        """Give up the fragment, which has no step yet."""
        self._free.append(self.buffers)
        self.filling = False

    def release(self, fragment: str) -> bool:
        """Take back the arrays of a fragment; False if they are another lane's."""
        buffers = self._lent.pop(fragment, None)
        if buffers is not None:
            self._free.append(buffers)
        return buffers is not None

    def snapshot(self) -> dict[str, Any]:
        """Return the state of simulations, episodes and randomness, between two fragments."""
        self.shard.start("snapshot")
        return {
            "environment": self.shard.finish(),
            "observations": self.shard.arrays.observations.copy(),
            "returns": self.returns.copy(),
            "lengths": self.lengths.copy(),
            "rng": self.rng.bit_generator.state,
            "steps_taken": self.steps_taken,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot; a reset must have come before."""
        self.shard.start("restore", state["environment"], state["observations"])
        self.shard.finish()
        self.returns[:], self.lengths[:], self._fresh[:] = state["returns"], state["lengths"], False
        self.rng.bit_generator.state = state["rng"]
        self.steps_taken = int(state["steps_taken"])

    def _choose(self, t: int) -> BoolArray | None:
        buffers = self.buffers
        return self._actor.choose(
            self.policy, buffers.observations[t], self.rng, buffers.actions[t], buffers.logprobs[t]
        )

    def _replace(self, t: int, bad: BoolArray) -> None:
        """Reset simulations that got no sound action; the episode is cut off at the last step that had one.

        Where that step is in the fragment before, which the learner may have had already, they are marked as fresh.
        """
        buffers = self.buffers
        for n in np.flatnonzero(bad):
            self._note(int(n), "a NaN or infinite action")
            if t == 0:
                self._fresh[n] = True
            elif not (buffers.terminated[t - 1, n] or buffers.truncated[t - 1, n]):
                buffers.truncated[t - 1, n] = True
                self._finals.append((t - 1, int(n), buffers.observations[t, n].copy()))
        self.shard.start("reset_some", bad)
        self.shard.finish()
        self.returns[bad], self.lengths[bad] = 0.0, 0
        buffers.observations[t] = self.shard.arrays.observations

    def _end(self, t: int, ended: NDArray[np.intp]) -> None:
        arrays = self.shard.arrays
        for n in ended:
            self._finals.append((t, int(n), arrays.finals[n].copy()))
            if arrays.causes[n]:
                self._note(int(n), CAUSES[int(arrays.causes[n])])
            else:
                self._episodes.append((float(self.returns[n]), int(self.lengths[n])))
        self.returns[ended], self.lengths[ended] = 0.0, 0

    def _note(self, n: int, cause: str) -> None:
        self._broken.add(self.index * self._shape.num_envs + n, self.steps_taken, cause)
