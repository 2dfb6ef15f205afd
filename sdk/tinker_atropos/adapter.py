"""What an adapter author implements: tokens ⇄ chat for the rollout, or a protocol served to others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict

from tinker_atropos.environment import Observation
from tinker_atropos.external import EndpointSettings, PolicyEndpoint, PolicySource
from tinker_atropos.trajectory import Completion, IntArray, Message, Sample, Segment, Stop


class AdapterConfig(BaseModel):
    """Base of an adapter's own configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """Describes an adapter to the registry without building it.

    `make` builds what the adapter offers: for a chat adapter (`sessions=True`) it is `make(config) -> SessionFactory`.
    `serves` is the word after `tinker-atropos serve` that `command`, a click command, answers to. An adapter that puts
    policies behind HTTP has `endpoint(config, source, settings)`, an async context manager that serves until its block
    ends.
    """

    name: str
    make: Callable[..., Any]
    config: type[AdapterConfig] = AdapterConfig
    sessions: bool = False
    endpoint: Callable[[Any, PolicySource, EndpointSettings], AbstractAsyncContextManager[PolicyEndpoint]] | None = None
    serves: str | None = None
    command: Callable[[], Any] | None = None
    description: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What to sample from: `tokens int32[T]`, the room left for new tokens, and the stop in the sampler's own form."""

    tokens: IntArray
    max_tokens: int
    stop: Stop


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """An episode in exact tokens (`segments`) and in messages. `masked` counts untrained sampled tokens by reason."""

    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    masked: Mapping[str, int] = field(default_factory=dict)


class TextSession(Protocol):
    """Keeps one episode in exact tokens. Pure bookkeeping: it never samples, so it never blocks."""

    def observe(self, observation: Observation, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Append messages, or raw text that no chat template touches."""
        ...

    def prompt(self, max_tokens: int | None) -> Prompt:
        """Return the exact prompt of the next turn; raises `ContextOverflow` where it leaves no room to sample."""
        ...

    def record(self, sample: Sample) -> Completion:
        """Keep the sampled tokens as they are; return their text without the stop."""
        ...

    def transcript(self) -> Transcript:
        """Return the episode so far."""
        ...


class SessionFactory(Protocol):
    """Opens one session per episode."""

    def open(self, tokenizer: Any, *, stop: Stop = None, context_length: int | None = None) -> TextSession:
        """Return a new session over a transformers tokenizer; `context_length` bounds prompt and completion."""
        ...
