"""What an author of an environment that drives itself implements: it samples over HTTP and hands in whole groups."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from tinker_atropos.trainer import TextPolicy
from tinker_atropos.trajectory import BoolArray, FinishReason, FloatArray, Group, IntArray, PolicyRef


class PolicySource(Protocol):
    """Where the newest policy is to be had; what inference endpoints sample from."""

    @property
    def newest(self) -> PolicyRef | None:
        """The newest policy, None before the first."""
        ...

    def use(self, step: int = 0) -> AbstractAsyncContextManager[TextPolicy]:
        """Hold the newest policy, once it is of `step` or later; it stays open until the block ends."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Proven:
    """Which tokens of a sequence the policy is known to have sampled.

    `mask bool[T]` is True on them, `logprobs float32[T]` are the sampler's there and 0 elsewhere. `policies` and
    `finish_reasons` have one entry per sampled turn, in order. No entry: nothing of it is known.
    """

    mask: BoolArray
    logprobs: FloatArray
    policies: tuple[PolicyRef, ...]
    finish_reasons: tuple[FinishReason, ...]


class PolicyEndpoint(Protocol):
    """The newest policy behind HTTP, and the memory of what it sampled."""

    @property
    def url(self) -> str:
        """Base URL of the OpenAI dialect, such as `http://127.0.0.1:8001/v1`."""
        ...

    @property
    def token(self) -> str | None:
        """What clients send as `Authorization: Bearer …`; None: nothing is asked for."""
        ...

    @property
    def model(self) -> str:
        """The name that clients may give as `model`."""
        ...

    @property
    def tokenizer(self) -> str:
        """What clients hand to `AutoTokenizer.from_pretrained`: a folder or a hub id.

        Raises `RunError` where only the first policy can tell and there is none yet.
        """
        ...

    @property
    def context_length(self) -> int | None:
        """The context in tokens, None before the first policy or where it states none."""
        ...

    async def ready(self) -> None:
        """Wait for the first policy; raises what kept it from being opened."""
        ...

    def seen(self) -> Mapping[str, int]:
        """Return what it has seen so far, by name: requests answered, refused and the like."""
        ...

    def prove(self, tokens: IntArray, logprobs: FloatArray | None = None) -> Proven:
        """Return what is known of `tokens int32[T]` from the sampled turns, by exact match of all tokens before.

        `logprobs float32[T]`, where a client sent some, choose among turns of equal tokens; else the oldest policy's
        counts, so that staleness is never understated.
        """
        ...


@dataclass(frozen=True, slots=True)
class RunInfo:
    """What an environment that drives itself may want to know of its run.

    `batch_size` and `group_size` count trajectories, `checkpoint_interval` steps. `folder` is the run's own.
    `max_token_length` bounds prompt and completion together. `max_staleness` counts the optimiser steps that a group
    may be old when it is trained on.
    """

    name: str
    folder: Path
    seed: int
    starting_step: int
    total_steps: int
    batch_size: int
    group_size: int
    max_token_length: int
    checkpoint_interval: int
    steps_per_eval: int
    filter_equal: bool
    max_staleness: int = 1


class GroupSink(Protocol):
    """Takes whole groups. It numbers nothing and knows no tokenizer."""

    info: RunInfo

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        ...

    @property
    def waiting(self) -> int:
        """Trajectories that wait to be trained on."""
        ...

    async def put(self, group: Group, *, wait: float | None = None) -> Literal["accepted", "duplicate", "blocked"]:
        """Add a group; idempotent by id. At the cap it waits `wait` seconds (None: for ever), then is `blocked`."""
        ...

    async def discard(self, group: Group, reason: str) -> None:
        """Record a group that arrived and can't be trained on; it ends with that reason, which is counted."""
        ...

    def metrics(self, values: Mapping[str, float]) -> None:
        """Add numbers of the environment's own to the next line of metrics, as `env/<name>`; the last value counts."""
        ...

    def say(self, line: str) -> None:
        """Show one line to the user."""
        ...


class ExternalEnvironment(Protocol):
    """An environment that drives itself.

    It may besides define `async close()`; `endpoint`, a mapping of `EndpointSettings` such as `{"port": 8001}`; and
    `state`, a `State` that others fill: the run then leases its groups there, and nothing comes through the sink.
    """

    async def run(self, endpoint: PolicyEndpoint, sink: GroupSink) -> None:
        """Produce groups until cancelled. A return or an error before the last step ends the run, which then says why.

        On cancellation it ends what it started.
        """
        ...


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where inference endpoints listen and what they call the model. Port 0: a free one.

    `records` is a folder in which they keep what was sampled, so that endpoints that start again there still know it.
    """

    model: str
    tokenizer: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    records: Path | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
