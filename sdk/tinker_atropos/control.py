"""The values and contracts of continuous and discrete control. Knows no simulator and no learner.

**An environment** of kind `control` is a `gymnasium.vector.VectorEnv`. `spec.make(config)` returns one; its
configuration has a field `num_envs: int` (the rollout makes smaller ones for shards, evaluations and pictures by
changing it) and, where it can be rendered, `render_mode: str | None` (`"rgb_array"`: `render()` returns a frame per
simulation). Its single observation space is a `Box`, or a `Discrete` (which policies and trainers see as a `Box` of
that many numbers, one of them 1); its single action space is a `Box` of one dimension or a `Discrete`;
`metadata["autoreset_mode"]` is `SAME_STEP` (with `final_obs`) or `DISABLED`. `reset(options={"reset_mask": bool[N]})`
resets those simulations alone (needed with `DISABLED`, and to go on after a NaN; one that contains NaNs itself says
where in `info["fault"]`, bool[N], having truncated those episodes). One that also is `Resumable` continues exactly
after a restart.

**A trainer** that learns `control` is a `ControlTrainer`; its configuration has the fields `steps_per_update: int` (the
steps T that each simulation takes for one update), `schedule: "sync" | "async"` and `total_env_steps: int | None` (of
all simulations together; a run that ends by `--steps` fills it in, so its trainer always finds the run's length).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tinker_atropos.trainer import Checkpoint, RunSpec
from tinker_atropos.trajectory import BoolArray, FloatArray, PolicyRef


@dataclass(frozen=True, slots=True, eq=False)
class Acted:
    """What a policy does with N observations: `actions float32[N, A]` or `int64[N]`, `logprobs float32[N]`.

    A discrete action counts from 0; the rollout adds the space's `start`.

    The actions are what the policy sampled; clipping to the space's bounds is the rollout's business, so that the
    log-probabilities stay those of the actions that are trained on.
    """

    actions: NDArray[Any]
    logprobs: FloatArray


class ControlPolicy(Protocol):
    """Acts under one immutable snapshot of weights and observation statistics.

    Not thread-safe: the rollout lets one thread in at a time, and copies what `act` returned before it calls again, so
    the arrays may be the policy's own. N may differ from call to call (shards, evaluations).
    """

    ref: PolicyRef

    def act(self, observations: NDArray[np.floating[Any]], rng: np.random.Generator | None) -> Acted:
        """Return actions for raw `observations float32[N, D]`; `rng` None: the mode (for evaluations)."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Fragment:
    """T steps of N simulations under one policy, in raw (unnormalised) numbers.

    `observations float32[T + 1, N, D]`, the last row what the step after the fragment would see; `actions float32[T, N,
    A]` or `int64[T, N]`; `logprobs float32[T, N]`; `rewards float32[T, N]`; `terminated` and `truncated bool[T, N]`.
    Where an episode ended in step t of simulation n, `observations[t + 1, n]` is the first of the next episode;
    `finals` holds the observation that it ended with, in the order of `np.argwhere(terminated | truncated)`:
    `float32[K, D]`. `episodes` lists whole episodes that ended in it, as (return, length). `lost bool[N]` marks
    simulations whose shard was lost: their last step is truncated, and the fragment has fewer steps than the others. A
    simulation that gave NaN or infinity was reset and its step is truncated with reward 0; its entry in `finals` is its
    last sound observation. N is the number of simulations of one shard: a batch holds several fragments.

    `shard` says which one: its fragments follow each other in time, in a batch and from batch to batch. `fresh bool[N]`
    marks simulations whose first row begins a new episode even if the shard's fragment before left theirs open (it may
    have been learned from before anybody knew): at the beginning and after a resumption, after a lost worker, and where
    the very first action was NaN. The fragment before ends with an observation to go on from, so its advantages are
    those of a truncation all the same; but what a learner carries across fragments begins anew. None: nowhere.

    The arrays are the rollout's and are used again: they are valid until the `update` that got them returned.
    """

    id: str
    observations: FloatArray
    actions: NDArray[Any]
    logprobs: FloatArray
    rewards: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    finals: FloatArray
    policy: PolicyRef
    episodes: tuple[tuple[float, int], ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: BoolArray | None = None
    shard: int = 0
    fresh: BoolArray | None = None

    @property
    def steps(self) -> int:
        """Environment steps in it: T times N."""
        return int(self.rewards.size)


@dataclass(frozen=True, slots=True, eq=False)
class ControlBatch:
    """What one trainer update learns from: `step` updates were done before it."""

    step: int
    fragments: tuple[Fragment, ...]


@dataclass(frozen=True, slots=True)
class ControlSpaces:
    """What a control trainer must know of its environment: Gymnasium's single observation and action space."""

    observation: Any
    action: Any
    task: str


@dataclass(frozen=True, slots=True, eq=False)
class ControlUpdate:
    """What an update gave: the new policy and its metrics (`loss/policy`, `loss/value`, `kl`, `entropy`, …)."""

    ref: PolicyRef
    policy: ControlPolicy
    metrics: Mapping[str, float]


class ControlTrainer(Protocol):
    """Owns the weights of a control policy. Its policies act in this process."""

    async def start(self, spec: RunSpec, spaces: ControlSpaces, resume: Checkpoint | None) -> ControlUpdate:
        """Make or load the weights; return the first policy. Raises `CheckpointError` for one of another task."""
        ...

    async def update(self, batch: ControlBatch) -> ControlUpdate:
        """Learn from a batch. Runs beside collection in the `async` schedule, so it works in a thread of its own."""
        ...

    async def save(self, name: str) -> Checkpoint:
        """Save weights, optimiser, statistics and random states under a name, so that training resumes exactly."""
        ...

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        """Write a policy that others load; return its folder."""
        ...

    async def close(self) -> None:
        """Free what the trainer holds. Called exactly once, also after a failed start."""
        ...


@runtime_checkable
class Resumable(Protocol):
    """A vector environment whose simulations can be saved between two steps and continued exactly."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return all that later steps depend on: NumPy arrays and JSON-ready values, in mappings and lists."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a snapshot of an environment made with the same configuration."""
        ...
