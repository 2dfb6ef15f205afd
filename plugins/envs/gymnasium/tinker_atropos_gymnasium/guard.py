"""Keeps NaN and infinity out of a run: names simulation and step, resets that simulation, counts it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv, VectorWrapper
from numpy.typing import NDArray
from tinker_atropos.errors import RunError

log = logging.getLogger(__name__)

FAULTS_SAID = 8  # each of them, then every time that their number has doubled
Mask: TypeAlias = NDArray[np.bool_]
Stepped: TypeAlias = tuple[Any, NDArray[Any], Mask, Mask, dict[str, Any]]


class Guard(VectorWrapper):
    """Gymnasium's vector environment, with wrong actions refused and faults contained.

    A NaN or infinity in an action, observation or reward truncates that simulation's episode with reward 0 and the
    observation before it (`infos["fault"]`), resets the simulation and is counted in `faults int64[N]`. The episodes of
    the others go on; how many faults are too many is for the rollout to say.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], task: str) -> None:
        super().__init__(env)
        self.faults = np.zeros(env.num_envs, np.int64)
        self._task = task
        self._steps = 0
        self._mode: AutoresetMode = env.metadata["autoreset_mode"]
        self._last: NDArray[Any] | None = None
        self._ended = np.zeros(env.num_envs, np.bool_)
        self._owed = np.zeros(env.num_envs, np.bool_)  # next_step: truncated here, so the next step must reset them

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; raises `RunError` if one begins with a NaN."""
        mask = (options or {}).get("reset_mask")
        observations, infos = self.env.reset(seed=seed, options=options)
        self._refuse_bad_start(observations)
        going_on = np.zeros(self.num_envs, np.bool_) if mask is None else ~mask
        self._ended, self._owed = self._ended & going_on, self._owed & going_on
        self._last = observations
        return observations, infos

    def step(self, actions: Any) -> Stepped:
        """Take one action in each simulation; raises `RunError` for a wrong shape or value."""
        if self._last is None:
            raise RunError(f"{self._task}: call reset() before the first step")
        self._steps += 1
        actions, bad_actions = self._checked(actions)
        unused = self._ended if self._mode is AutoresetMode.NEXT_STEP else np.zeros(self.num_envs, np.bool_)
        observations, rewards, terminated, truncated, infos = self.env.step(actions)
        if self._owed.any():
            observations = self._pay(observations, rewards, terminated, truncated)
        found = [
            bad_actions & ~unused,
            _not_finite(observations),
            _not_finite(rewards),
            _bad_finals(infos, self.num_envs),
        ]
        faulty: Mask = np.logical_or.reduce(found)
        if faulty.any():
            names = ("action", "observation", "reward", "final observation")
            for row in np.flatnonzero(faulty).tolist():
                self._count(row, next(name for name, mask in zip(names, found, strict=True) if mask[row]))
            rewards[faulty], terminated[faulty], truncated[faulty] = 0.0, False, True
            observations, infos = self._contain(faulty, observations, infos)
        self._ended = terminated | truncated
        self._last = observations
        return observations, rewards, terminated, truncated, infos

    def _contain(
        self, faulty: Mask, observations: NDArray[Any], infos: Mapping[str, Any]
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """End the episodes of these simulations with the observation before, as the autoreset mode says."""
        assert self._last is not None
        before = self._last
        observations = observations.copy()
        contained = {**infos, "fault": faulty, "_fault": faulty}
        if self._mode is AutoresetMode.SAME_STEP:
            observations[faulty] = self._reset_rows(faulty)[faulty]
            finals = infos.get("final_obs", np.full(self.num_envs, None, dtype=object)).copy()
            for row in np.flatnonzero(faulty).tolist():
                finals[row] = before[row].copy()
            contained |= {"final_obs": finals, "_final_obs": infos.get("_final_obs", False) | faulty}
        else:
            observations[faulty] = before[faulty]
            self._owed = faulty if self._mode is AutoresetMode.NEXT_STEP else self._owed
        return observations, contained

    def _pay(
        self, observations: NDArray[Any], rewards: NDArray[Any], terminated: Mask, truncated: Mask
    ) -> NDArray[Any]:
        """Reset what the wrapped environment does not know to have ended; what it did in this step is void."""
        owed, self._owed = self._owed, np.zeros(self.num_envs, np.bool_)
        rewards[owed], terminated[owed], truncated[owed] = 0.0, False, False
        return np.where(_as_rows(owed, observations), self._reset_rows(owed), observations)

    def _reset_rows(self, mask: Mask) -> NDArray[Any]:
        observations, _ = self.env.reset(options={"reset_mask": mask.copy()})
        self._refuse_bad_start(observations, mask)
        return np.asarray(observations)

    def _checked(self, actions: Any) -> tuple[NDArray[Any], Mask]:
        """Return the actions with what is not finite replaced, and where that was."""
        actions = np.asarray(actions)
        space = self.single_action_space
        if actions.shape != self.action_space.shape:
            raise RunError(
                f"{self._task}: the actions have shape {actions.shape}; {self.num_envs} simulations with the action "
                f"space {space} need {self.action_space.shape}"
            )
        if isinstance(space, spaces.Discrete):
            if actions.dtype.kind not in "iu":
                raise RunError(
                    f"{self._task}: the actions are {actions.dtype}; the action space {space} needs integers"
                )
            wrong = (actions < space.start) | (actions >= space.start + space.n)
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise RunError(
                    f"{self._task}, simulation {row}, step {self._steps}: the action {actions[row]} is not within the "
                    f"action space {space}"
                )
            return actions, np.zeros(self.num_envs, np.bool_)
        bad = _not_finite(actions)
        if bad.any():
            actions = actions.copy()
            actions[bad] = np.clip(0, space.low, space.high)  # type: ignore[attr-defined]
        return actions, bad

    def _count(self, row: int, what: str) -> None:
        self.faults[row] += 1
        total = int(self.faults.sum())
        if total <= FAULTS_SAID or total & (total - 1) == 0:
            log.warning(
                "%s, simulation %d, step %d: the %s is not finite (NaN or infinity); it was reset (fault %d)",
                *(self._task, row, self._steps, what, total),
            )

    def _refuse_bad_start(self, observations: NDArray[Any], mask: Mask | None = None) -> None:
        bad = _not_finite(observations)
        if mask is not None:
            bad &= mask
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise RunError(
                f"{self._task}, simulation {row}: the first observation of an episode is not finite: "
                f"{observations[row]!s:.80}; the environment itself is broken, check env.make_kwargs"
            )


def _as_rows(mask: Mask, values: NDArray[Any]) -> Mask:
    return mask.reshape(-1, *(1,) * (values.ndim - 1))


def _not_finite(values: NDArray[Any]) -> Mask:
    """Return which rows of `values [N, …]` hold a NaN or an infinity, bool[N]."""
    if values.dtype.kind != "f":
        return np.zeros(len(values), np.bool_)
    bad: Mask = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    return bad


def _bad_finals(infos: Mapping[str, Any], count: int) -> Mask:
    bad = np.zeros(count, np.bool_)
    for row in np.flatnonzero(infos.get("_final_obs", bad)).tolist():
        bad[row] = not np.isfinite(infos["final_obs"][row]).all()
    return bad
