"""Fakes for the run loop: a tokenizer of characters, a policy whose weights are one number, and its trainer.

They stand for what is slow (a model), not for what is tested: rollout, state, schedule, folder and resume are real.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import (
    AdapterSpec,
    Batch,
    Checkpoint,
    Completion,
    ContextOverflow,
    PolicyRef,
    Prompt,
    RunSpec,
    Sample,
    SamplingParams,
    Segment,
    Task,
    TrainerConfig,
    TrainerSpec,
    Transcript,
    Update,
    single_turn,
)
from tinker_atropos.config import Config, load
from tinker_atropos.contract_tests.ledger import segment_hash
from tinker_atropos.registry import Registry
from tinker_atropos.rollout.schedule import derive_seed


class FakeSession:
    """Characters are tokens; a turn ends with a newline."""

    def __init__(self, context_length: int | None) -> None:
        self._context = context_length
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._mask: list[bool] = []
        self._messages: list[dict[str, Any]] = []

    def observe(self, observation: Any, tools: Any = None) -> None:
        text = observation if isinstance(observation, str) else "".join(m["content"] for m in observation)
        self._messages.append({"role": "user", "content": text})
        self._extend([ord(c) for c in text], [0.0] * len(text), False)

    def prompt(self, max_tokens: int | None) -> Prompt:
        room = None if self._context is None else self._context - len(self._tokens)
        if room is not None and room < 1:
            raise ContextOverflow(f"{len(self._tokens)} tokens leave no room in {self._context}")
        return Prompt(np.array(self._tokens, np.int32), min(max_tokens or 4, room or 4), None)

    def record(self, sample: Sample) -> Completion:
        self._extend(sample.tokens.tolist(), sample.logprobs.tolist(), True)
        text = "".join(chr(t) for t in sample.tokens).rstrip("\n")
        self._messages.append({"role": "assistant", "content": text})
        return Completion(text, sample.stop_reason, tokens=len(sample.tokens))

    def transcript(self) -> Transcript:
        segment = Segment(
            np.array(self._tokens, np.int32), np.array(self._logprobs, np.float32), np.array(self._mask, bool)
        )
        return Transcript((segment,), tuple(self._messages))

    def _extend(self, tokens: list[int], logprobs: list[float], mask: bool) -> None:
        self._tokens += tokens
        self._logprobs += logprobs
        self._mask += [mask] * len(tokens)


class FakeSessions:
    def open(self, tokenizer: Any, *, stop: Any = None, context_length: int | None = None) -> FakeSession:
        return FakeSession(context_length)


@dataclass
class FakeService:
    """What the fake trainer and its policies share: delays, planned failures, and what was seen."""

    sample_seconds: float = 0.0
    update_seconds: float = 0.0
    jitter: bool = False
    digits: int = 10
    weights: dict[str, int] = field(default_factory=dict)
    released: list[PolicyRef] = field(default_factory=list)
    requests: list[tuple[int, int]] = field(default_factory=list)  # (policy step, n)
    batches: list[Batch] = field(default_factory=list)
    on_update: Callable[[int], None] = lambda step: None
    on_sample: Callable[[int], None] = lambda count: None
    trainers: int = 0


class FakeConfig(TrainerConfig):
    learning_rate: float = 0.1
    local: bool = False


@dataclass
class FakePolicy:
    service: FakeService
    ref: PolicyRef
    context_length: int | None = 512

    def tokenizer(self) -> Any:
        return None

    async def sample(self, prompt: Any, params: SamplingParams, n: int) -> list[Sample]:
        self.service.requests.append((self.ref.step, n))
        self.service.on_sample(len(self.service.requests))
        weight = self.service.weights[self.ref.uri]
        rng = np.random.default_rng([weight, params.seed or 0, *prompt.tolist()])
        delay = self.service.sample_seconds * (rng.random() * 2 if self.service.jitter else 1)
        if delay:
            await asyncio.sleep(delay)
        samples = []
        for _ in range(n):
            tokens = np.array([ord("0") + rng.integers(self.service.digits), ord("\n")], np.int32)
            samples.append(Sample(tokens, -rng.random(2).astype(np.float32), "stop", self.ref))
        return samples

    async def logprobs(self, tokens: Any) -> Any:
        raise NotImplementedError


class FakeTrainer:
    """Its weights are one number that every batch changes; saved as a file, journalled as the real server does."""

    def __init__(self, service: FakeService) -> None:
        self.service = service
        service.trainers += 1

    async def start(self, spec: RunSpec, resume: Checkpoint | None) -> PolicyRef:
        self.spec = spec
        self.model = f"m{spec.lineage}"
        self.step, self.weight = 0, spec.seed
        self.journal = spec.folder / "journal.jsonl"
        self._log("create_model")
        if resume is not None:
            saved = json.loads(Path(resume.state).read_text())
            self.step, self.weight = saved["step"], saved["weight"]
            self._log("load_state", path=resume.state)
        return self._publish()

    async def update(self, batch: Batch) -> Update:
        assert batch.step == self.step
        self.service.on_update(batch.step)
        await asyncio.sleep(self.service.update_seconds)
        advantages, hashes, digest = [], [], hashlib.sha256(str(self.weight).encode())
        for group in batch.groups:
            mean = sum(group.scores) / len(group.scores)
            rows = []
            for trajectory in group.trajectories:
                row = []
                for segment in trajectory.segments:
                    values = np.where(segment.mask, np.float32(trajectory.reward - mean), np.float32(0))
                    digest.update(segment.tokens.tobytes() + segment.logprobs.tobytes() + values.tobytes())
                    hashes.append(
                        segment_hash(Segment(segment.tokens, segment.logprobs, segment.mask, values.astype(np.float32)))
                    )
                    row.append(values.astype(np.float32))
                rows.append(row)
            advantages.append(rows)
        self._log("forward_backward", data=hashes)
        self.weight = int.from_bytes(digest.digest()[:4], "little")
        self.step += 1
        self._log("optim_step")
        self.service.batches.append(batch)
        return Update(self._publish(), {"loss": self.weight / 2**32}, advantages)

    async def save(self, name: str) -> Checkpoint:
        path = self.spec.folder / f"{name}-{self.model}.state"
        path.write_text(json.dumps({"step": self.step, "weight": self.weight}))
        self._log("save_state", path=str(path))
        return Checkpoint(name, self.step, str(path), str(path))

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        raise NotImplementedError

    async def release(self, ref: PolicyRef) -> None:
        self.service.released.append(ref)

    async def close(self) -> None:
        pass

    def _publish(self) -> PolicyRef:
        uri = f"fake://{self.model}/{self.step}"
        self.service.weights[uri] = self.weight
        return PolicyRef(self.spec.name, self.spec.lineage, self.step, uri)

    def _log(self, event: str, **fields: Any) -> None:
        seq = len(self.journal.read_text().splitlines()) if self.journal.exists() else 0
        with self.journal.open("a") as file:
            line = {"seq": seq, "time": 0.0, "event": event, "model": self.model, "step": self.step, **fields}
            file.write(json.dumps(line) + "\n")


@pytest.fixture
def service() -> FakeService:
    return FakeService()


def fake_registry(service: FakeService) -> Registry:
    """Return a registry with the fake trainer and adapter and a small environment `parity`: an even digit is right."""
    registry = Registry(points=[])

    async def open_policy(ref: PolicyRef, config: Any) -> FakePolicy:
        return FakePolicy(service, ref)

    registry.add(
        "trainer",
        TrainerSpec(
            name="fake",
            make=lambda config: FakeTrainer(service),
            open_policy=open_policy,
            kinds=frozenset({"text"}),
            config=FakeConfig,
        ),
    )
    registry.add("adapter", AdapterSpec(name="fake_sessions", make=lambda config: FakeSessions(), sessions=True))
    registry.add(
        "env",
        single_turn(
            "parity",
            tasks=lambda split: [Task(f"{split} {n}:") for n in range(20 if split == "train" else 5)],
            reward=lambda completion, task: completion.text.isdigit() and int(completion.text) % 2 == 0,
        ),
    )
    return registry


@pytest.fixture
def registry(service: FakeService) -> Registry:
    return fake_registry(service)


class Notes:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.steps: list[dict[str, float]] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def step(self, metrics: Any, total: int) -> None:
        self.steps.append(dict(metrics))

    def rollout(self, title: str, trajectory: Any) -> None:
        self.said.append(title)

    def close(self) -> None:
        pass


@pytest.fixture
def notes() -> Notes:
    return Notes()


@pytest.fixture
def make_config(registry: Registry, tmp_path: Path) -> Callable[..., Config]:
    """Return a configuration of a small fake run; keyword arguments with `__` for `.` change it."""

    def make(**changes: Any) -> Config:
        settings = {
            "run.env": "parity",
            "run.trainer": "fake",
            "run.name": "small",
            "run.output": str(tmp_path / "runs"),
            "rollout.adapter": "fake_sessions",
            "env.group_size": 4,
            "env.batch_size": 8,
            "env.total_steps": 6,
            "env.steps_per_eval": 3,
            "env.max_batches_offpolicy": 0,
            "trainer.save_checkpoint_interval": 2,
        } | {key.replace("__", "."): value for key, value in changes.items()}
        return load(None, [(key, value, key) for key, value in settings.items()], registry=registry)

    return make


@pytest.fixture
def seed_of() -> Callable[..., int]:
    return derive_seed
