"""Fakes for control runs: simulated environments that cost nothing, and a trainer whose weights are one number.

They stand for what is slow (physics, a network), not for what is tested: collection, workers and folder are real.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from tinker_atropos import Checkpoint, EnvironmentConfig, EnvironmentSpec, PolicyRef, TrainerConfig, TrainerSpec
from tinker_atropos.config import Config, load
from tinker_atropos.control import Acted, ControlBatch, ControlUpdate, Fragment
from tinker_atropos.registry import Registry


class FakeWalkConfig(EnvironmentConfig):
    num_envs: int = 4
    horizon: int = 13
    autoreset: Literal["SAME_STEP", "NEXT_STEP", "DISABLED"] = "SAME_STEP"
    step_seconds: float = 0.0
    threads: int = 1  # as environments call how many threads step their simulations
    nan: str = ""  # "observation" or "reward": simulation 1 gives one in its 5th step; "contained": it truncates there
    exit_file: str = ""  # a worker process ends in its 7th step, once: then the file exists; "always": each time
    hang_file: str = ""  # a worker process hangs in its 7th step, once, deaf to all but SIGKILL
    raises: bool = False
    render_mode: str | None = None


class FakeWalk(VectorEnv):
    """A walk in the plane: an action is a move, the reward the nearness to the origin; ends far out or at a horizon."""

    def __init__(self, config: FakeWalkConfig) -> None:
        self.config, self.num_envs = config, config.num_envs
        self.metadata = {"autoreset_mode": AutoresetMode[config.autoreset], "render_modes": ["rgb_array"]}
        self.single_observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (3,))
        self.single_action_space = gymnasium.spaces.Box(-0.5, 0.5, (2,))
        self.places = np.zeros((self.num_envs, 2))
        self.ages = np.zeros(self.num_envs, int)
        self.rng = np.random.default_rng(0)
        self.steps = 0
        self.seen: list[Any] = []
        self.closed = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        mask = np.ones(self.num_envs, bool) if options is None else options["reset_mask"]
        self.places[mask] = self.rng.uniform(-1, 1, (int(mask.sum()), 2))
        self.ages[mask] = 0
        return self._observe(), {}

    def step(self, actions: Any) -> Any:
        self.steps += 1
        if self.config.step_seconds:
            time.sleep(self.config.step_seconds)
        if self.config.exit_file and self.steps == 7 and first_at(self.config.exit_file):
            os._exit(3)
        if self.config.hang_file and self.steps == 7 and first_at(self.config.hang_file):
            Path(self.config.hang_file).write_text(str(os.getpid()))
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(1000)
        if self.config.raises:
            raise ValueError("the floor is missing")
        self.seen.append(np.array(actions))
        self.places += actions
        self.ages += 1
        observations, rewards = self._observe(), 1.0 - np.abs(self.places).sum(1)
        terminated, truncated = np.abs(self.places).max(1) > 2.5, self.ages >= self.config.horizon
        fault = np.zeros(self.num_envs, bool)
        if self.config.nan == "contained" and self.steps == 5:
            truncated[1] = fault[1] = True
        elif self.config.nan and self.steps == 5:
            (rewards if self.config.nan == "reward" else observations)[1] = np.nan
        ended = terminated | truncated
        info: dict[str, Any] = {}
        if ended.any() and self.config.autoreset == "SAME_STEP":
            info = {"final_obs": observations.copy(), "_final_obs": ended}
            observations[ended] = self.reset(options={"reset_mask": ended})[0][ended]
        return observations, rewards, terminated, truncated, info | ({"fault": fault} if fault.any() else {})

    def _observe(self) -> Any:
        return np.concatenate([self.places, self.ages[:, None]], axis=1)

    def render(self) -> Any:
        return tuple(np.full((40, 60, 3), self.steps % 256, np.uint8) for _ in range(self.num_envs))

    def close(self, **kwargs: Any) -> None:
        self.closed = True


class FakeResumableWalk(FakeWalk):
    def snapshot(self) -> dict[str, Any]:
        return {
            "places": self.places.copy(),
            "ages": self.ages.copy(),
            "rng": self.rng.bit_generator.state,
            "steps": self.steps,
        }

    def restore(self, state: Any) -> None:
        self.places[:], self.ages[:], self.steps = state["places"], state["ages"], state["steps"]
        self.rng.bit_generator.state = state["rng"]


@dataclass
class FakeControlService:
    """What the fake trainer and the tests share: delays, planned failures, and what was seen."""

    update_seconds: float = 0.0
    work_seconds: float = 0.0  # of busy work in a thread, as optimisation is
    keep: bool = True
    nan_logprobs: bool = False
    nan_action_at: int = -1  # the policies' n-th call gives a NaN
    batches: list[ControlBatch] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)
    acted: int = 0
    on_update: Callable[[int], None] = lambda step: None
    on_act: Callable[[int], None] = lambda step: None
    closed: int = 0


class FakePolicy:
    """Draws moves towards a point that its one weight decides."""

    def __init__(self, service: FakeControlService, ref: PolicyRef, weight: int, discrete: bool, size: int) -> None:
        self.service, self.ref, self.discrete, self.size = service, ref, discrete, size
        self.goal = (weight % 1000) / 1000 - 0.5

    def act(self, observations: Any, rng: np.random.Generator | None) -> Acted:
        self.service.acted += 1
        self.service.on_act(self.ref.step)
        n = len(observations)
        if self.discrete:
            actions = np.zeros(n, np.int64) if rng is None else rng.integers(self.size, size=n)
            logprobs = np.full(n, np.nan if self.service.nan_logprobs else -0.5, np.float32)
            return Acted(actions, logprobs)
        noise = np.zeros((n, self.size)) if rng is None else rng.normal(0, 1, (n, self.size))
        actions = (self.goal - 0.1 * observations[:, : self.size] + noise).astype(np.float32)
        if self.service.acted == self.service.nan_action_at:
            actions[0] = np.nan
        return Acted(actions, (-0.5 * (noise**2).sum(1)).astype(np.float32))


class FakeControlConfig(TrainerConfig):
    save_checkpoint_interval: int = 2
    steps_per_update: int = 8
    schedule: Literal["sync", "async"] = "sync"
    total_env_steps: int | None = None


class FakeControlTrainer:
    """Its weight is a digest of all that it was given; saved as a file."""

    def __init__(self, service: FakeControlService, config: FakeControlConfig) -> None:
        self.service, self.config = service, config

    async def start(self, spec: Any, spaces: Any, resume: Checkpoint | None) -> ControlUpdate:
        self.spec, self.spaces = spec, spaces
        self.service.starts.append((spec.config, spaces, resume))
        self.step, self.weight = 0, spec.seed
        if resume is not None:
            saved = json.loads(Path(resume.state).read_text())
            self.step, self.weight = saved["step"], saved["weight"]
        return self._update()

    async def update(self, batch: ControlBatch) -> ControlUpdate:
        assert batch.step == self.step
        self.service.on_update(batch.step)
        if self.service.update_seconds:
            await asyncio.sleep(self.service.update_seconds)
        if self.service.work_seconds:
            await asyncio.to_thread(work, self.service.work_seconds)
        digest = hashlib.sha256(str(self.weight).encode())
        for fragment in batch.fragments:
            for name in ARRAYS:
                digest.update(np.ascontiguousarray(getattr(fragment, name)).tobytes())
        if self.service.keep:
            self.service.batches.append(ControlBatch(batch.step, tuple(map(copied, batch.fragments))))
        self.weight = int.from_bytes(digest.digest()[:4], "little")
        self.step += 1
        return self._update()

    async def save(self, name: str) -> Checkpoint:
        path = self.spec.folder / f"{name}-{self.spec.lineage}.state"
        path.write_text(json.dumps({"step": self.step, "weight": self.weight}))
        return Checkpoint(name, self.step, str(path), str(path))

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        raise NotImplementedError

    async def close(self) -> None:
        self.service.closed += 1

    def _update(self) -> ControlUpdate:
        ref = PolicyRef(self.spec.name, self.spec.lineage, self.step, f"fake://{self.spec.lineage}/{self.step}")
        action = self.spaces.action
        discrete = hasattr(action, "n")
        policy = FakePolicy(self.service, ref, self.weight, discrete, int(action.n) if discrete else action.shape[0])
        return ControlUpdate(ref, policy, {"loss/policy": self.weight / 2**32})


ARRAYS = ("observations", "actions", "logprobs", "rewards", "terminated", "truncated", "finals")


def first_at(place: str) -> bool:
    """Whether nobody was there before; always at "always"."""
    try:
        if place != "always":
            Path(place).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def copied(fragment: Fragment) -> Fragment:
    """Return a fragment whose arrays the rollout won't write into again."""
    arrays = {name: getattr(fragment, name).copy() for name in ARRAYS}
    rest = {name: getattr(fragment, name) for name in ("id", "policy", "episodes", "metrics", "lost", "shard", "fresh")}
    return Fragment(**arrays, **rest)


def work(seconds: float) -> None:
    """Multiply matrices for so many seconds of this thread's own processor time."""
    matrix = np.random.default_rng(0).random((128, 128))
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        matrix = matrix @ matrix
        matrix /= np.abs(matrix).max()


def fake_control_registry(service: FakeControlService) -> Registry:
    """Return a registry with the fake walks and the fake trainer."""
    registry = Registry(points=[])

    async def open_policy(ref: PolicyRef, config: Any) -> Any:
        raise NotImplementedError

    for name, kind in (("walk", FakeWalk), ("resumable_walk", FakeResumableWalk)):
        registry.add("env", EnvironmentSpec(name, make=kind, kind="control", config=FakeWalkConfig))
    registry.add(
        "trainer",
        TrainerSpec(
            name="fake_control",
            make=lambda config: FakeControlTrainer(service, config),
            open_policy=open_policy,
            kinds=frozenset({"control"}),
            config=FakeControlConfig,
        ),
    )
    return registry


def control_config(registry: Registry, output: Path, **changes: Any) -> Config:
    """Return a configuration of a small fake control run; keyword arguments with `__` for `.` change it."""
    settings = {
        "run.env": "resumable_walk",
        "run.trainer": "fake_control",
        "run.name": "small",
        "run.output": str(output),
        "env.steps_per_eval": 0,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    if not {"env.total_steps", "trainer.total_env_steps"} & set(settings):
        settings["env.total_steps"] = 6
    return load(None, [(key, value, key) for key, value in settings.items()], registry=registry)
