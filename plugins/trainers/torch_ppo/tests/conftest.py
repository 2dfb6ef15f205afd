"""Spaces, made-up fragments, and a small sequential collector over Gymnasium's vector environments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tinker_atropos.control import ControlPolicy, ControlSpaces, Fragment
from tinker_atropos.trainer import RunSpec
from tinker_atropos.trajectory import PolicyRef


def box(low: float, high: float, *shape: int) -> Any:
    """What a trainer reads of a Gymnasium Box."""
    dtype = np.dtype(np.float32)
    return SimpleNamespace(low=np.full(shape, low, dtype), high=np.full(shape, high, dtype), shape=shape, dtype=dtype)


def discrete(n: int, start: int = 0) -> Any:
    """What a trainer reads of a Gymnasium Discrete."""
    return SimpleNamespace(n=n, start=start, shape=(), dtype=np.dtype(np.int64))


@pytest.fixture
def continuous_spaces() -> ControlSpaces:
    return ControlSpaces(box(-np.inf, np.inf, 5), box(-0.4, 0.4, 3), "Walk-v0")


@pytest.fixture
def discrete_spaces() -> ControlSpaces:
    return ControlSpaces(box(-np.inf, np.inf, 5), discrete(4, start=1), "Choose-v0")


@pytest.fixture
def run_spec(tmp_path: Path) -> Callable[..., RunSpec]:
    def make(**changes: Any) -> RunSpec:
        values: dict[str, Any] = {
            "name": "run", "folder": tmp_path, "config": None, "model": None, "seed": 3, "deterministic": True,
            "lineage": 0, "say": lambda line: None,
        }  # fmt: skip
        return RunSpec(**{**values, **changes})

    return make


@pytest.fixture
def made_up() -> Callable[..., Fragment]:
    """A fragment of `policy` in a world of random numbers: 5 observations, episodes that end now and then."""

    def make(policy: ControlPolicy, seed: int, steps: int = 16, width: int = 4, scale: float = 1.0) -> Fragment:
        rng = np.random.default_rng(seed)
        observations = rng.normal(2.0, 3.0, (steps + 1, width, 5)).astype(np.float32)
        acted = [policy.act(row, rng) for row in observations[:-1]]
        terminated, truncated = rng.random((2, steps, width)) < 0.1
        return Fragment(
            id=f"f{seed}",
            observations=observations,
            actions=np.stack([one.actions for one in acted]),
            logprobs=np.stack([one.logprobs for one in acted]),
            rewards=(scale * rng.normal(1.0, 2.0, (steps, width))).astype(np.float32),
            terminated=terminated,
            truncated=truncated,
            finals=rng.normal(2.0, 3.0, (int((terminated | truncated).sum()), 5)).astype(np.float32),
            policy=policy.ref,
        )

    return make


class SmallCollector:
    """Steps a Gymnasium vector environment (autoreset SAME_STEP) under one policy at a time."""

    def __init__(self, environment: Any, seed: int) -> None:
        self.environment, self.rng = environment, np.random.default_rng(seed)
        self.observations, _ = environment.reset(seed=seed)
        self.returns, self.lengths = np.zeros(environment.num_envs), np.zeros(environment.num_envs, int)
        space = environment.single_action_space
        self.bounds = (space.low, space.high) if hasattr(space, "low") else None
        self.count = 0

    def collect(self, policy: ControlPolicy, steps: int) -> Fragment:
        kept: dict[str, list[Any]] = {
            name: [] for name in ("observations", "actions", "logprobs", "rewards", "terminated", "truncated")
        }
        finals: list[Any] = []
        episodes: list[tuple[float, int]] = []
        for _ in range(steps):
            acted = policy.act(self.observations, self.rng)
            kept["observations"].append(self.observations.astype(np.float32))
            actions = acted.actions if self.bounds is None else np.clip(acted.actions, *self.bounds)
            self.observations, rewards, terminated, truncated, info = self.environment.step(actions)
            self.returns += rewards
            self.lengths += 1
            for n in np.flatnonzero(terminated | truncated):
                finals.append(info["final_obs"][n])
                episodes.append((float(self.returns[n]), int(self.lengths[n])))
                self.returns[n], self.lengths[n] = 0.0, 0
            for name, value in (
                ("actions", acted.actions), ("logprobs", acted.logprobs), ("rewards", rewards.astype(np.float32)),
                ("terminated", terminated.copy()), ("truncated", truncated.copy()),
            ):  # fmt: skip
                kept[name].append(value)
        kept["observations"].append(self.observations.astype(np.float32))
        self.count += 1
        stacked: dict[str, Any] = {name: np.stack(values) for name, values in kept.items()}
        return Fragment(
            id=f"f{self.count}",
            finals=np.array(finals, np.float32).reshape(-1, *self.observations.shape[1:]),
            policy=policy.ref,
            episodes=tuple(episodes),
            **stacked,
        )


@pytest.fixture
def small_collector() -> type[SmallCollector]:
    return SmallCollector


@pytest.fixture
def any_ref() -> PolicyRef:
    return PolicyRef("run", 0, 0, "memory://run/0/0")
