"""What a trainer author implements: an owner of weights that updates them and hands out immutable policies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tinker_atropos.environment import Kind
from tinker_atropos.trajectory import Batch, FloatArray, IntArray, PolicyRef, Sample, SamplingParams

if TYPE_CHECKING:
    from tinker_atropos.control import ControlPolicy, ControlTrainer


class TrainerConfig(BaseModel):
    """Base of a trainer plugin's own configuration; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    save_checkpoint_interval: int = Field(10, ge=0, description="steps between run checkpoints; 0: only at the end")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a trainer's state of one step is kept: `state` resumes training, `weights` samples and exports."""

    name: str
    step: int
    state: str
    weights: str

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-ready mapping; `Checkpoint(**mapping)` is its inverse."""
        return {"name": self.name, "step": self.step, "state": self.state, "weights": self.weights}


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What a trainer is told about its run.

    `folder` is the run's own folder, where a trainer may keep what it owns. `model` None: the trainer's default.
    `lineage` counts rewinds. `say` shows one line to the user, for waits, retries and pauses.
    """

    name: str
    folder: Path
    config: Any
    model: str | None
    seed: int
    deterministic: bool
    lineage: int
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """What one optimiser step gave: the new policy, its metrics, and the per-token advantages that were trained on.

    `advantages[g][t][s]` is a `float32[T]` beside segment `s` of trajectory `t` of group `g` of the batch.
    """

    ref: PolicyRef
    metrics: Mapping[str, float]
    advantages: Sequence[Sequence[Sequence[FloatArray]]]


class Trainer(Protocol):
    """Owns the weights. Runs in one place; its policies are opened anywhere, without it."""

    async def start(self, spec: RunSpec, resume: Checkpoint | None) -> PolicyRef:
        """Load or create the weights; return the first policy. Raises `TrainerError` if the service refuses."""
        ...

    async def update(self, batch: Batch) -> Update:
        """Take one optimiser step. Never blocks sampling from earlier policies."""
        ...

    async def save(self, name: str) -> Checkpoint:
        """Save resumable state (with the optimiser) and sampler weights under a name."""
        ...

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        """Write weights that a user can load elsewhere; return their folder."""
        ...

    async def release(self, ref: PolicyRef) -> None:
        """Free a policy that nobody in flight needs any more."""
        ...

    async def close(self) -> None:
        """Free what the trainer holds. Called exactly once, also after a failed start."""
        ...


class TextPolicy(Protocol):
    """Samples text from one immutable snapshot."""

    ref: PolicyRef
    context_length: int | None

    def tokenizer(self) -> Any:
        """Return the transformers tokenizer of the model."""
        ...

    async def sample(self, prompt: IntArray, params: SamplingParams, n: int) -> list[Sample]:
        """Return `n` samples of `prompt int32[T]`. Cancellable. Raises `PolicyUnavailable` if none can be had."""
        ...

    async def logprobs(self, tokens: IntArray) -> FloatArray:
        """Return `float32[T]`, the log-probability of each token given those before it; the first is NaN."""
        ...


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """One stored checkpoint. `kind` is `state` (resumes training) or `weights` (samples, exports).

    `created` and `expires` are ISO 8601 times, `size` bytes; None where the service does not say.
    """

    uri: str
    kind: str
    base_model: str | None = None
    lora_rank: int | None = None
    size: int | None = None
    created: str | None = None
    expires: str | None = None


class CheckpointCatalogue(Protocol):
    """The stored checkpoints of a run, or of an account."""

    async def list(self) -> Sequence[CheckpointInfo]:
        """Return all of them, newest first."""
        ...

    async def info(self, uri: str) -> CheckpointInfo:
        """Return one; raises `CheckpointError` if there is none of that name."""
        ...

    async def download(self, uri: str, to: Path) -> Path:
        """Write its weights as a folder that others load (LoRA: a PEFT adapter); return that folder."""
        ...

    async def close(self) -> None:
        """Free the connection, and the server that was started for it."""
        ...


@dataclass(frozen=True, slots=True)
class Quote:
    """What a run is about to spend, shown before it starts. `hosted` runs ask for a confirmation."""

    hosted: bool
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StoredPolicy:
    """Weights to sample from where no run is on: `uri` as a checkpoint names them, None for the base `model` as it is.

    `folder` is where whatever serves them keeps its log and its store: the run's folder, where they are a run's. `run`
    and `step` name the policy in what is recorded. `deterministic`: a request's samples do not depend on others sampled
    at the same time, where the trainer can have it so. `say` shows one line to the user.
    """

    uri: str | None
    model: str | None
    folder: Path
    run: str
    step: int
    deterministic: bool
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainerSpec:
    """Describes a trainer to the registry without building it.

    `kinds` are the environment kinds it learns, `can` what else (`token_advantages`, `tools`, `images`).
    `make(config) -> Trainer`; `open_policy(ref, config)` opens a policy anywhere. `check(config, model)` refuses,
    before anything heavy is imported, what can't work here (a missing key, an absent adapter, an unknown model name).
    `quote(config, model)` says what a run would use. `unused(config)` names keys of its own section
    (or `section.key` paths of others) that have no effect with this configuration, with the reason.
    `checkpoints(config, folder)` opens the stored checkpoints: those of the run in `folder`, or with None those of the
    account, if `has_account`: False for a trainer that keeps them in the runs' folders alone. `stored(config, policy)`
    opens stored weights outside of a run, as an async context manager that also ends the server it started for them.
    """

    name: str
    make: Callable[[Any], Trainer | ControlTrainer]
    open_policy: Callable[[PolicyRef, Any], Awaitable[TextPolicy | ControlPolicy]]
    kinds: frozenset[Kind]
    config: type[TrainerConfig] = TrainerConfig
    can: frozenset[str] = frozenset()
    check: Callable[[Any, str | None], None] | None = None
    quote: Callable[[Any, str | None], Quote] | None = None
    unused: Callable[[Any], Mapping[str, str]] | None = None
    default_model: Callable[[Any], str] | None = None
    checkpoints: Callable[[Any, Path | None], Awaitable[CheckpointCatalogue]] | None = None
    has_account: bool = True
    stored: Callable[[Any, StoredPolicy], AbstractAsyncContextManager[TextPolicy]] | None = None
    description: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)


if TYPE_CHECKING:
    TinkerAtroposTrainer: Any
else:

    def __getattr__(name: str) -> Any:
        """Find what the original kept here; see `compat`."""
        from tinker_atropos.compat import find

        return find(__name__, name)
