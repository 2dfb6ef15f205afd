"""A shard's simulations: one VectorEnv behind arrays of fixed place, its autoreset mode and its NaNs dealt with.

Runs where the simulator runs, in this process or in a worker. Knows no policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinker_atropos.control import ControlSpaces
from tinker_atropos.errors import PluginError, RunError, TinkerAtroposError
from tinker_atropos.trajectory import BoolArray, FloatArray

SOUND, BAD_OBSERVATION, BAD_REWARD, CONTAINED = 0, 1, 2, 3
CAUSES = {
    BAD_OBSERVATION: "a NaN or infinite observation",
    BAD_REWARD: "a NaN or infinite reward",
    CONTAINED: "a fault that the environment contained itself",
}

Allocate = Callable[[tuple[int, ...], Any], NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """What must be known to lay out a shard: how many simulations, and the shapes of one's observation and action."""

    num_envs: int
    observation: tuple[int, ...]
    action: tuple[int, ...]
    discrete: bool

    @staticmethod
    def of(spaces: ControlSpaces, num_envs: int) -> Shape:
        """Return the shape of a shard with `num_envs` simulations."""
        discrete = is_discrete(spaces.action)
        return Shape(num_envs, tuple(spaces.observation.shape), () if discrete else spaces.action.shape, discrete)

    @property
    def action_type(self) -> Any:
        """`int64` for discrete actions, else `float32`."""
        return np.int64 if self.discrete else np.float32


@dataclass(frozen=True, slots=True, eq=False)
class ShardArrays:
    """Where rollout and simulator meet; overwritten by every step.

    `actions` (as the space has them: clipped, or with its `start`) go in. Out come `observations float32[N, D]`,
    `rewards float64[N]`, `terminated` and `truncated bool[N]`, `finals float32[N, D]` (rows where an episode ended)
    and `causes uint8[N]`: 0, or why the simulation had to be reset.
    """

    actions: NDArray[Any]
    observations: FloatArray
    rewards: NDArray[np.float64]
    terminated: BoolArray
    truncated: BoolArray
    finals: FloatArray
    causes: NDArray[np.uint8]

    @staticmethod
    def made(shape: Shape, allocate: Allocate = np.zeros) -> ShardArrays:
        """Return arrays for a shard, from `allocate(shape, dtype)`."""
        n = (shape.num_envs,)
        return ShardArrays(
            actions=allocate(n + shape.action, shape.action_type),
            observations=allocate(n + shape.observation, np.float32),
            rewards=allocate(n, np.float64),
            terminated=allocate(n, np.bool_),
            truncated=allocate(n, np.bool_),
            finals=allocate(n + shape.observation, np.float32),
            causes=allocate(n, np.uint8),
        )


def is_discrete(space: Any) -> bool:
    """Whether a space is Gymnasium's `Discrete`."""
    return hasattr(space, "n") and hasattr(space, "start")


def is_resumable(environment: Any) -> bool:
    """Whether an environment is `Resumable`, also where a Gymnasium wrapper hands the methods on."""
    return callable(getattr(environment, "snapshot", None)) and callable(getattr(environment, "restore", None))


def check_spaces(environment: Any, name: str, task: str) -> ControlSpaces:
    """Return the spaces of a made VectorEnv; raises `PluginError` for one that the rollout can't drive."""
    for attribute in ("num_envs", "single_observation_space", "single_action_space", "metadata", "step", "reset"):
        if not hasattr(environment, attribute):
            raise PluginError(
                f"environment {name!r} is of kind 'control', but its make() returned {type(environment).__name__} "
                f"without {attribute!r}; return a gymnasium.vector.VectorEnv"
            )
    observation, action = environment.single_observation_space, environment.single_action_space
    if is_discrete(observation):
        observation = _one_of(int(observation.n))
    elif not hasattr(observation, "low"):
        raise PluginError(
            f"environment {name!r} has the observation space {observation}; expected a Box or a Discrete: wrap it with "
            "gymnasium.wrappers.vector.FlattenObservation"
        )
    if not is_discrete(action) and not (hasattr(action, "low") and len(action.shape) == 1):
        raise PluginError(
            f"environment {name!r} has the action space {action}; expected a Discrete, or a Box of one dimension"
        )
    autoreset_mode(environment, name)
    return ControlSpaces(observation=observation, action=action, task=task)


def _one_of(n: int) -> Any:
    """Return the space of n numbers of which one is 1: how a `Discrete` observation is given to policies."""
    from gymnasium.spaces import Box  # an environment with such a space has brought it

    return Box(0.0, 1.0, (n,), np.float32)


def autoreset_mode(environment: Any, name: str) -> str:
    """Return `SAME_STEP` or `DISABLED`; raises `PluginError` for another mode or none."""
    mode = environment.metadata.get("autoreset_mode")
    said = getattr(mode, "name", str(mode).rpartition(".")[2])
    if said not in ("SAME_STEP", "DISABLED"):
        known = "states no autoreset mode" if mode is None else f"has the autoreset mode {said}"
        reason = ", whose step after an episode's end takes no action and can't be trained on" if said else ""
        raise PluginError(
            f"environment {name!r} {known}{reason if said == 'NEXT_STEP' else ''}; make it with "
            "autoreset_mode=AutoresetMode.SAME_STEP and state it in metadata['autoreset_mode'] (where it is a setting, "
            "env.autoreset=same_step)"
        )
    return str(said)


class Simulations:
    """Steps one VectorEnv. After every call `arrays` hold what the next action is to be chosen by."""

    def __init__(self, environment: Any, name: str, arrays: ShardArrays) -> None:
        self._environment, self._name, self._arrays = environment, name, arrays
        self._same_step = autoreset_mode(environment, name) == "SAME_STEP"
        space = environment.single_observation_space
        self._first = int(space.start) if is_discrete(space) else 0
        self._rows: FloatArray | None = np.eye(int(space.n), dtype=np.float32) if is_discrete(space) else None
        if environment.num_envs != len(arrays.rewards):
            raise PluginError(
                f"environment {name!r} was asked for num_envs={len(arrays.rewards)} and made {environment.num_envs} "
                "simulations; its make() must heed config.num_envs"
            )

    def reset(self, seed: int) -> None:
        """Begin new episodes everywhere."""
        observations, _ = self._call("reset", seed=seed)
        self._take(observations)
        self._refuse_unsound("after a reset")

    def reset_some(self, mask: BoolArray) -> None:
        """Begin new episodes where `mask bool[N]` is True, and nowhere else."""
        arrays = self._arrays
        before = arrays.observations.copy()
        observations, _ = self._call("reset", options={"reset_mask": mask.copy()})
        self._take(observations)
        changed = ~mask & (arrays.observations != before).reshape(len(mask), -1).any(axis=1)
        if changed.any():
            raise PluginError(
                f"environment {self._name!r} was asked to reset simulation {_indices(mask)} alone and changed "
                f"{_indices(changed)} too: it must heed reset(options={{'reset_mask': …}})"
            )
        self._refuse_unsound("after a reset")

    def step(self) -> None:
        """Take `arrays.actions`."""
        arrays = self._arrays
        observations, rewards, terminated, truncated, info = self._call("step", arrays.actions)
        arrays.causes[:] = SOUND
        if (fault := info.get("fault")) is not None:
            arrays.causes[np.asarray(fault, np.bool_)] = CONTAINED
        sound = arrays.observations  # until now: what the actions were chosen by
        arrays.rewards[:], arrays.terminated[:], arrays.truncated[:] = rewards, terminated, truncated
        new = self._numbers(observations)
        with np.errstate(over="ignore"):
            small = np.asarray(rewards, np.float32)
        self._check_shape(new)
        ended = arrays.terminated | arrays.truncated
        if ended.any():
            self._finals(ended, new, info)
        if np.isfinite(new).all() and np.isfinite(small).all():
            sound[:] = new
        else:
            self._mend(new, small)
        if not self._same_step and ended.any():
            again = ended & ((arrays.causes == SOUND) | (arrays.causes == CONTAINED))
            if again.any():
                self.reset_some(again)

    def snapshot(self) -> Mapping[str, Any]:
        """Return the simulator's state."""
        state: Mapping[str, Any] = self._call("snapshot")
        return state

    def restore(self, state: Mapping[str, Any], observations: FloatArray) -> None:
        """Continue from a snapshot, with the observations of that moment."""
        self._call("restore", state)
        self._arrays.observations[:] = observations

    def close(self) -> None:
        """Close the simulator."""
        self._environment.close()

    def _finals(self, ended: BoolArray, new: FloatArray, info: Mapping[str, Any]) -> None:
        """Keep the observation that each ended episode ended with; an unsound one becomes the last sound one."""
        arrays = self._arrays
        given: Any = new
        if self._same_step:
            given = info.get("final_obs")
            if given is None:
                raise PluginError(
                    f"environment {self._name!r} ended an episode and gave no info['final_obs'], which autoreset mode "
                    "SAME_STEP owes"
                )
        for n in np.flatnonzero(ended):
            # The observations of a DISABLED mode are numbers already.
            arrays.finals[n] = self._numbers(given[n]) if self._same_step else given[n]
            if not np.isfinite(arrays.finals[n]).all():
                arrays.causes[n] = BAD_OBSERVATION
                arrays.finals[n] = arrays.observations[n]
                arrays.terminated[n], arrays.truncated[n] = False, True

    def _mend(self, new: FloatArray, rewards: FloatArray) -> None:
        """Truncate and reset the simulations that gave NaN or infinity: their last sound observation is the final."""
        arrays = self._arrays
        bad_reward = ~np.isfinite(rewards)
        bad = ~np.isfinite(new.reshape(len(new), -1)).all(axis=1)
        arrays.causes[bad_reward] = BAD_REWARD
        arrays.causes[bad] = BAD_OBSERVATION
        unsound = bad | bad_reward
        arrays.finals[unsound] = arrays.observations[unsound]
        arrays.rewards[unsound] = 0.0
        arrays.terminated[unsound], arrays.truncated[unsound] = False, True
        arrays.observations[~unsound] = new[~unsound]
        self.reset_some(unsound)

    def _take(self, observations: Any) -> None:
        new = self._numbers(observations)
        self._check_shape(new)
        self._arrays.observations[:] = new

    def _numbers(self, observations: Any) -> FloatArray:
        """Return observations as float32; of a `Discrete` space as rows of which one number is 1."""
        if self._rows is not None:
            chosen: FloatArray = self._rows[np.asarray(observations) - self._first]
            return chosen
        with np.errstate(over="ignore"):
            return np.asarray(observations, np.float32)

    def _check_shape(self, new: FloatArray) -> None:
        if new.shape != self._arrays.observations.shape:
            raise PluginError(
                f"environment {self._name!r} gave observations of shape {new.shape}; its observation space and "
                f"num_envs say {self._arrays.observations.shape}"
            )

    def _refuse_unsound(self, when: str) -> None:
        rows = self._arrays.observations.reshape(len(self._arrays.rewards), -1)
        bad = ~np.isfinite(rows).all(axis=1)
        if bad.any():
            raise RunError(
                f"environment {self._name!r}: simulation {_indices(bad)} gave a NaN or infinite observation {when}; "
                "the simulator itself is at fault"
            )

    def _call(self, method: str, *values: Any, **named: Any) -> Any:
        try:
            return getattr(self._environment, method)(*values, **named)
        except TinkerAtroposError:
            raise
        except Exception as error:
            raise RunError(
                f"environment {self._name!r} failed in {method}(): {type(error).__name__}: {error}"
            ) from error


def _indices(mask: Any) -> str:
    return ", ".join(str(n) for n in np.flatnonzero(mask))
