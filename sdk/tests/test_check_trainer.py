"""`check_trainer` passes a trainer that keeps its contract and names what one that does not breaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinker_atropos import Batch, Checkpoint, PolicyRef, RunSpec, Sample, SamplingParams, TrainerSpec, Update
from tinker_atropos.testing import ContractViolated, check_trainer
from tinker_atropos.trainer import TrainerConfig


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 8 for letter in text]


class Small:
    """A distribution over eight tokens, whatever the prompt; flaws are planted by overriding."""

    def __init__(self, ref: PolicyRef, logits: Any) -> None:
        self.ref, self.context_length = ref, None
        self._logits = logits

    @property
    def _logprobs(self) -> Any:
        return self._logits - np.log(np.exp(self._logits).sum())

    def tokenizer(self) -> FakeTokenizer:
        return FakeTokenizer()

    async def sample(self, prompt: Any, params: SamplingParams, n: int) -> list[Sample]:
        rng = np.random.default_rng(params.seed)
        rows = [rng.choice(8, size=params.max_tokens, p=np.exp(self._logprobs)).astype(np.int32) for _ in range(n)]
        return [Sample(row, self._logprobs[row].astype(np.float32), "length", self.ref) for row in rows]

    async def logprobs(self, tokens: Any) -> Any:
        return np.array([np.nan, *self._logprobs[tokens[1:]]], np.float32)


class SmallTrainer:
    """Moves its logits by what it is given; its policies are files."""

    def __init__(self, config: TrainerConfig) -> None:
        pass

    async def start(self, spec: RunSpec, resume: Checkpoint | None) -> PolicyRef:
        self.spec, self.step = spec, resume.step if resume else 0
        self.logits = np.array(json.loads(Path(resume.state).read_text())) if resume else np.zeros(8)
        return self.publish()

    def publish(self) -> PolicyRef:
        return PolicyRef("check", self.spec.lineage, self.step, self.write(f"{self.spec.lineage}-{self.step}"))

    def write(self, name: str) -> str:
        path = self.spec.folder / f"{name}.json"
        path.write_text(json.dumps(list(self.logits)))
        return str(path)

    async def update(self, batch: Batch) -> Update:
        self.logits = self.logits + np.arange(8) / 10
        self.step += 1
        advantages = [
            [[np.zeros(len(s.tokens), np.float32) for s in t.segments] for t in g.trajectories] for g in batch.groups
        ]
        return Update(self.publish(), {"loss": 0.5}, advantages)

    async def save(self, name: str) -> Checkpoint:
        path = self.write(name)
        return Checkpoint(name, self.step, path, path)

    async def export(self, ref: PolicyRef, to: Path) -> Path:
        to.mkdir()
        (to / "weights").write_text("8 numbers")
        return to

    async def release(self, ref: PolicyRef) -> None:
        Path(ref.uri).unlink()

    async def close(self) -> None:
        pass


async def open_small(ref: PolicyRef, config: Any) -> Any:
    return Small(ref, np.array(json.loads(Path(ref.uri).read_text())))


GOOD = TrainerSpec(name="small", make=SmallTrainer, open_policy=open_small, kinds=frozenset({"text"}))


async def test_a_sound_trainer_passes() -> None:
    await check_trainer(GOOD)


class Mutable(SmallTrainer):
    shared = np.zeros(8)

    async def update(self, batch: Batch) -> Update:
        Mutable.shared += 1 * np.arange(8)
        return await super().update(batch)


async def open_mutable(ref: PolicyRef, config: Any) -> Small:
    return Small(ref, Mutable.shared)


class Forgets(SmallTrainer):
    async def start(self, spec: RunSpec, resume: Checkpoint | None) -> PolicyRef:
        await super().start(spec, resume)
        self.logits = np.zeros(8)
        return self.publish()


class CountsWrong(SmallTrainer):
    async def update(self, batch: Batch) -> Update:
        self.step += 1
        return await super().update(batch)


class FlatAdvantages(SmallTrainer):
    async def update(self, batch: Batch) -> Update:
        return replace(await super().update(batch), advantages=[])


class NotFinite(SmallTrainer):
    async def update(self, batch: Batch) -> Update:
        return replace(await super().update(batch), metrics={"loss": float("nan")})


class NoExport(SmallTrainer):
    async def export(self, ref: PolicyRef, to: Path) -> Path:
        return to


class ReleasesAll(SmallTrainer):
    async def release(self, ref: PolicyRef) -> None:
        for path in self.spec.folder.glob("0-*.json"):
            path.write_text("[0, 0, 0, 0, 0, 0, 0, 0]")


class Tempered(Small):
    async def sample(self, prompt: Any, params: SamplingParams, n: int) -> list[Sample]:
        samples = await super().sample(prompt, params, n)
        return [replace(s, logprobs=(s.logprobs / 2).astype(np.float32)) for s in samples]


class Fewer(Small):
    async def sample(self, prompt: Any, params: SamplingParams, n: int) -> list[Sample]:
        return (await super().sample(prompt, params, n))[1:]


def opening(policy: type[Small]) -> Callable[..., Any]:
    async def open_it(ref: PolicyRef, config: Any) -> Small:
        return policy(ref, np.array(json.loads(Path(ref.uri).read_text())))

    return open_it


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"make": Mutable, "open_policy": open_mutable}, "a policy changed when its trainer went on"),
        ({"make": Forgets}, "the resumed policy is not the saved one"),
        ({"make": CountsWrong}, "update() at step 0 gave a policy of step 2"),
        ({"make": FlatAdvantages}, "update() returned advantages of the shapes"),
        ({"make": NotFinite}, "metrics that are not finite: {'loss': nan}"),
        ({"make": NoExport}, "where there are no weights"),
        ({"open_policy": opening(Tempered)}, "differ from what logprobs() says"),
        ({"open_policy": opening(Fewer)}, "sample(n=4) returned 3 samples"),
        ({"kinds": frozenset({"control"})}, "check_trainer knows trainers that learn text"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_planted_flaw_is_named(change: dict[str, Any], message: str) -> None:
    Mutable.shared = np.zeros(8)
    with pytest.raises(ContractViolated) as caught:
        await check_trainer(replace(GOOD, **change))
    assert message in str(caught.value)


async def test_a_release_that_takes_others_along_is_found() -> None:
    with pytest.raises(ContractViolated):
        await check_trainer(replace(GOOD, make=ReleasesAll))
