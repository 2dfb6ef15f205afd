"""The values that travel between environment, rollout and trainer. They know no tokenizer and no trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

Message: TypeAlias = dict[str, Any]
"""One chat message: `role`, `content`, and where the role has them `tool_calls`, `tool_call_id`, `name`."""

Messages: TypeAlias = Sequence[Message]

Stop: TypeAlias = str | int | Sequence[str | int] | None
"""Where sampling ends. None: the model's own end-of-turn ids. `[]`: nowhere but at the length limit."""

FinishReason: TypeAlias = Literal["stop", "length"]
"""`stop`: a stop was sampled. `length`: the token limit or the context ended the turn."""

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
BoolArray: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """Names one immutable snapshot of the policy.

    `step` counts optimiser steps. A rewind to a checkpoint begins a new `lineage`, so a snapshot of dead weights can't
    pass for a live one. `expires` is in seconds since the epoch, None: as long as its trainer's session lives.
    `endpoint` is where `uri` is served, None: the trainer's default.
    """

    run: str
    lineage: int
    step: int
    uri: str
    expires: float | None = None
    endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class TaskRef:
    """Names one task. The same reference gives the same task on every machine.

    `index` counts within the split; for an endless split it may be any number. `seed` feeds whatever the episode draws
    at random.
    """

    split: str
    index: int
    seed: int


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one turn.

    `max_tokens`: new tokens at most. `temperature` 0 is greedy. `top_k` -1 and `top_p` 1 are off. `seed` None: whatever
    the sampler draws. Log-probabilities always come back raw, so training is on-policy only at temperature 1 with
    `top_k` and `top_p` off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: Stop = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What the sampler returned for one turn: `tokens int32[T]` with the stop, if any, raw `logprobs float32[T]`."""

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: FinishReason
    ref: PolicyRef


@dataclass(frozen=True, slots=True)
class Completion:
    """What the environment sees of one turn: the text without its stop, and why it ended.

    `tokens` counts what was sampled, the stop included.
    """

    text: str
    finish_reason: FinishReason = "stop"
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    tokens: int = 0

    @property
    def truncated(self) -> bool:
        """Whether the turn ran into its length limit."""
        return self.finish_reason == "length"


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A run of tokens exactly as the sampler saw and made them.

    `tokens int32[T]`; `mask bool[T]`, True on the tokens that the policy sampled and that are trained on; `logprobs
    float32[T]`, the sampler's, 0 where the mask is False; `advantages float32[T]` only where the environment sets them
    itself. The arrays become read-only. An episode is one segment as long as every prompt extends the tokens before it;
    where a chat template does not keep its prefix a new segment begins.
    """

    tokens: IntArray
    logprobs: FloatArray
    mask: BoolArray
    advantages: FloatArray | None = None

    def __post_init__(self) -> None:
        shape = self.tokens.shape
        if len(shape) != 1 or self.logprobs.shape != shape or self.mask.shape != shape:
            raise ValueError(
                f"a segment needs tokens, logprobs and mask of one length, got {shape}, {self.logprobs.shape} and "
                f"{self.mask.shape}"
            )
        if self.advantages is not None and self.advantages.shape != shape:
            raise ValueError(f"advantages {self.advantages.shape} must have the shape of the tokens {shape}")
        for array in (self.tokens, self.logprobs, self.mask, self.advantages):
            if array is not None:
                array.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One episode, whole.

    `rewards`, `finish_reasons` and `policies` have one entry a turn. `masked` counts the tokens that were sampled but
    are not trained on, by reason. `metrics` are the environment's own numbers, logged apart. `truncated`: the episode
    was cut off (context, turn limit, time) rather than ended by the environment.
    """

    segments: tuple[Segment, ...]
    rewards: tuple[float, ...]
    finish_reasons: tuple[FinishReason, ...]
    policies: tuple[PolicyRef, ...]
    messages: tuple[Message, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    masked: Mapping[str, int] = field(default_factory=dict)
    truncated: bool = False

    @property
    def reward(self) -> float:
        """The sum of the rewards of all turns."""
        return float(sum(self.rewards))

    @property
    def oldest_step(self) -> int:
        """The optimiser step of the oldest policy that sampled a turn of it."""
        return min((ref.step for ref in self.policies), default=0)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled that are trained on."""
        return int(sum(int(segment.mask.sum()) for segment in self.segments))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Trajectories of one task, scored against each other. `id` is unique in a run, also across its restarts."""

    id: str
    task: TaskRef
    trajectories: tuple[Trajectory, ...]
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> tuple[float, ...]:
        """The reward of each trajectory."""
        return tuple(trajectory.reward for trajectory in self.trajectories)

    @property
    def oldest_step(self) -> int:
        """The optimiser step of the oldest policy in it; a group is as stale as its oldest turn."""
        return min((trajectory.oldest_step for trajectory in self.trajectories), default=0)


@dataclass(frozen=True, slots=True)
class Batch:
    """What one optimiser step trains on: `step` is the number of optimiser steps done before it."""

    step: int
    groups: tuple[Group, ...]
