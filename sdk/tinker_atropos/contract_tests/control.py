"""The contract of a control environment, checked by driving it with random actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinker_atropos.contract_tests.environment import ContractViolated
from tinker_atropos.control_state import ControlState, read_state, write_state
from tinker_atropos.errors import TinkerAtroposError
from tinker_atropos.rollout.simulations import autoreset_mode, check_spaces, is_discrete, is_resumable

SIMULATIONS = 3

RAISED = "{method}() raised {error}"
NUM_ENVS = "asked for {asked} simulations, it made {got}"
SHAPE = "{method}() gave {what} of shape {got}; expected {expected}"
KIND = "{method}() gave {what} of type {got}; expected {expected}"
OUTSIDE = "{method}() gave simulation {n} the observation {value}, which is not in its space {space}"
NOT_FINITE = "step() gave simulation {n} the reward {value}; it must be a finite number"
NO_FINALS = "an episode ended and step() gave no info['final_obs'] for simulation {n}, which SAME_STEP owes"
NOT_DETERMINISTIC = "the same seed and actions gave other {what} in step {step} the second time"
NOT_REPRODUCIBLE = "made a second time, the same seed and actions gave other {what} in step {step}"
SHARED_STATE = "beside another instance, the same seed and actions gave other {what} in step {step}"
MASK_IGNORED = "reset(options={{'reset_mask': …}}) changed simulation {n}, which the mask leaves out"
NOT_RESUMED = "after restore() the same actions gave other {what} in step {step} than after snapshot()"

Step = Mapping[str, NDArray[Any]]


def check_control(make: Callable[[int], Any], *, name: str = "it", steps: int = 300, seed: int = 1) -> None:
    """Raise `ContractViolated` if the VectorEnv that `make(num_envs)` returns breaks its contract.

    Drives it for `steps` steps, longer than an episode if its end is to be seen. Checks: a stated autoreset mode that
    the rollout can drive; observations of the space, in shape and bounds; finite rewards, `bool` ends; the final
    observation of each episode that ended; that a seed decides everything, also in another instance and beside one;
    that a partial reset is one; where it has `snapshot()` and `restore()`, that it goes on exactly, also
    from a file; that `close()` works.
    """
    environment, other = make(SIMULATIONS), make(SIMULATIONS)
    try:
        check_spaces(environment, name, name)
        _check_size(environment)
        player = _Player(environment, name)
        alone = player.play(seed, steps)
        _same(alone, player.play(seed, steps), NOT_DETERMINISTIC)
        second = _Player(other, name)
        _same(alone, second.play(seed, steps), NOT_REPRODUCIBLE)
        _same(alone, player.play(seed, steps, beside=second), SHARED_STATE)
        player.check_mask(seed)
        if is_resumable(environment):
            _check_resume(player, second, seed, min(steps, 50))
    except ContractViolated:
        raise
    except TinkerAtroposError as error:
        raise ContractViolated(str(error)) from error
    finally:
        for made in (environment, other):
            _call(made, "close")


class _Player:
    """Drives one instance and checks all that it gives."""

    def __init__(self, environment: Any, name: str) -> None:
        self.environment = environment
        self._same_step = autoreset_mode(environment, name) == "SAME_STEP"
        self._space, self._actions = environment.single_observation_space, environment.single_action_space

    def play(self, seed: int, steps: int, beside: _Player | None = None) -> list[Step]:
        """Reset with the seed and take `steps` random steps; return copies of all that came back."""
        rng, others = np.random.default_rng(seed), np.random.default_rng(seed + 1)
        played: list[Step] = [{"observations": self.reset(seed)}]
        if beside is not None:
            beside.reset(seed + 1)
        for _ in range(steps):
            played.append(self.step(self.draw(rng)))
            if beside is not None:
                beside.step(beside.draw(others))
        return played

    def draw(self, rng: np.random.Generator) -> NDArray[Any]:
        """Return random actions within the space."""
        n, space = self.environment.num_envs, self._actions
        if is_discrete(space):
            drawn: NDArray[Any] = rng.integers(space.start, space.start + space.n, size=n)
            return drawn
        drawn = np.clip(rng.normal(size=(n, *space.shape)), space.low, space.high).astype(space.dtype)
        return drawn

    def reset(self, seed: int) -> NDArray[Any]:
        """Reset with a seed; return a copy of the observations."""
        observations, _ = _call(self.environment, "reset", seed=seed)
        self._check_observations("reset", observations)
        return np.array(observations)

    def step(self, actions: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Take a step; return copies of what it gave."""
        observations, rewards, terminated, truncated, info = _call(self.environment, "step", actions)
        self._check_observations("step", observations)
        n = (self.environment.num_envs,)
        for what, value in (("rewards", rewards), ("terminated", terminated), ("truncated", truncated)):
            if np.shape(value) != n:
                raise ContractViolated(SHAPE.format(method="step", what=what, got=np.shape(value), expected=n))
        for what, value in (("terminated", terminated), ("truncated", truncated)):
            if np.asarray(value).dtype != np.bool_:
                raise ContractViolated(
                    KIND.format(method="step", what=what, got=np.asarray(value).dtype, expected="bool")
                )
        for place in np.flatnonzero(~np.isfinite(np.asarray(rewards, float))):
            raise ContractViolated(NOT_FINITE.format(n=place, value=rewards[place]))
        played = {
            "observations": np.array(observations),
            "rewards": np.array(rewards),
            "terminated": np.array(terminated),
            "truncated": np.array(truncated),
        }
        ended = played["terminated"] | played["truncated"]
        if ended.any():
            played["final observations"] = self._finals(ended, played["observations"], info)
            if not self._same_step:
                played["observations"] = self.reset_some(ended)
        return played

    def reset_some(self, mask: NDArray[np.bool_]) -> NDArray[Any]:
        """Reset those simulations; return a copy of the observations."""
        observations, _ = _call(self.environment, "reset", options={"reset_mask": mask.copy()})
        self._check_observations("reset", observations)
        return np.array(observations)

    def check_mask(self, seed: int) -> None:
        """Raise `ContractViolated` if a partial reset reaches others."""
        self.reset(seed)
        before = self.step(self.draw(np.random.default_rng(seed)))
        mask = np.zeros(self.environment.num_envs, np.bool_)
        mask[0] = True
        after = self.reset_some(mask)
        for n in range(1, self.environment.num_envs):
            if not np.array_equal(before["observations"][n], after[n]):
                raise ContractViolated(MASK_IGNORED.format(n=n))

    def _finals(self, ended: NDArray[np.bool_], new: NDArray[Any], info: Mapping[str, Any]) -> NDArray[Any]:
        given: Any = info.get("final_obs") if self._same_step else new
        finals = []
        for n in np.flatnonzero(ended):
            if given is None or given[n] is None:
                raise ContractViolated(NO_FINALS.format(n=n))
            self._check_one("step", int(n), given[n])
            finals.append(np.array(given[n]))
        return np.array(finals)

    def _check_observations(self, method: str, observations: Any) -> None:
        expected = (self.environment.num_envs, *self._space.shape)
        if np.shape(observations) != expected:
            raise ContractViolated(
                SHAPE.format(method=method, what="observations", got=np.shape(observations), expected=expected)
            )
        for n, observation in enumerate(observations):
            self._check_one(method, n, observation)

    def _check_one(self, method: str, n: int, observation: Any) -> None:
        value = np.asarray(observation)
        if np.isfinite(value).all() and self._space.contains(value.astype(self._space.dtype)):
            return
        raise ContractViolated(OUTSIDE.format(method=method, n=n, value=f"{value!s:.80}", space=self._space))


def _check_size(environment: Any) -> None:
    if environment.num_envs != SIMULATIONS:
        raise ContractViolated(NUM_ENVS.format(asked=SIMULATIONS, got=environment.num_envs))


def _check_resume(player: _Player, second: _Player, seed: int, steps: int) -> None:
    """Snapshot in the middle; the same instance, and another that got it from a file, must go on alike."""
    rng = np.random.default_rng(seed)
    player.play(seed, steps)
    actions = [player.draw(rng) for _ in range(steps)]
    snapshot = _call(player.environment, "snapshot")
    with TemporaryDirectory() as folder:
        path = Path(folder) / "state.npz"
        write_state(path, ControlState(0, 0, [snapshot]))
        kept = read_state(path).lanes
    assert kept is not None
    onward = [player.step(action) for action in actions]
    for place, state in ((player, snapshot), (second, kept[0])):
        if place is second:
            second.reset(seed + 1)
        _call(place.environment, "restore", state)
        _same(onward, [place.step(action) for action in actions], NOT_RESUMED)


def _same(first: list[Any], second: list[Any], message: str) -> None:
    for step, (one, other) in enumerate(zip(first, second, strict=True)):
        for what in one:
            if what not in other or not np.array_equal(one[what], other[what]):
                raise ContractViolated(message.format(what=what, step=step))


def _call(environment: Any, method: str, *values: Any, **named: Any) -> Any:
    try:
        return getattr(environment, method)(*values, **named)
    except Exception as error:
        raise ContractViolated(RAISED.format(method=method, error=f"{type(error).__name__}: {error}")) from error
