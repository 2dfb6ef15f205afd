"""The contract of a trainer that learns text, checked by training it for two steps and resuming it."""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinker_atropos.contract_tests.environment import ContractViolated, hold
from tinker_atropos.trainer import Checkpoint, RunSpec, TrainerSpec
from tinker_atropos.trajectory import (
    Batch,
    FloatArray,
    Group,
    PolicyRef,
    Sample,
    SamplingParams,
    Segment,
    TaskRef,
    Trajectory,
)

PROMPT = "12 + 30 ="
SIZE = 4
LENGTH = 6


async def check_trainer(
    spec: TrainerSpec,
    *,
    config: Mapping[str, Any] | None = None,
    model: str | None = None,
    timeout: float = 300.0,
    tolerance: float = 1e-3,
) -> None:
    """Raise `ContractViolated` if a trainer that learns text breaks its contract.

    It is made with the settings `config` and the `model`, trained for two steps on what its own policy samples, saved,
    and resumed in a lineage of its own. Checks: references that count steps and name their lineage; samples with raw
    log-probabilities, in order with what `logprobs` says to `tolerance`; a sampled old policy that later training does
    not change; advantages in the shape of what was trained on; finite metrics; a checkpoint that a new trainer resumes
    to the same policy; an export that exists; a release that harms no other policy. No call may take longer than
    `timeout` seconds.
    """
    from tinker_atropos.config import validate

    if "text" not in spec.kinds:
        raise ContractViolated(f"check_trainer knows trainers that learn text; {spec.name!r} learns {set(spec.kinds)}")
    made = validate(spec.config, dict(config or {}), path=f"trainer {spec.name}")
    with tempfile.TemporaryDirectory(prefix="check-trainer-") as folder:
        check = _Check(spec, made, model, Path(folder), timeout, tolerance)
        saved, samples, expected = await check.first_life()
        await check.second_life(saved, samples, expected)


class _Check:
    def __init__(
        self, spec: TrainerSpec, config: Any, model: str | None, folder: Path, timeout: float, tolerance: float
    ) -> None:
        self.spec, self.config, self.model = spec, config, model
        self.folder, self.timeout, self.tolerance = folder, timeout, tolerance

    async def first_life(self) -> tuple[Checkpoint, list[Sample], FloatArray]:
        """Two steps, a checkpoint; returns it with samples of its policy, and their log-probabilities there."""
        trainer: Any = self.spec.make(self.config)
        try:
            first = await self._call("start", trainer.start(self._run(0), None))
            hold(first.step == 0, f"start() of a new run gave a policy of step {first.step}; it must be 0")
            hold(first.lineage == 0, f"start() gave a policy of lineage {first.lineage}; the run's is 0")
            old = await self._open(first)
            prompt = self._prompt(old)
            samples = await self._samples(old, prompt, seed=1)
            before = await self._scored(old, prompt, samples)
            second = await self._step(trainer, prompt, samples, first)
            third = await self._step(trainer, prompt, await self._samples(await self._open(second), prompt, 2), second)
            after = await self._scored(old, prompt, samples)
            hold(
                np.allclose(before, after, atol=self.tolerance),
                "a policy changed when its trainer went on: its log-probabilities of the same tokens moved by up to "
                f"{np.abs(before - after).max():.3g}; a reference must name an immutable snapshot",
            )
            await self._call("release", trainer.release(first))
            newest = await self._open(third)
            samples = await self._samples(newest, prompt, seed=3)
            expected = await self._scored(newest, prompt, samples)
            saved = await self._call("save", trainer.save("step-000002"))
            hold(isinstance(saved, Checkpoint), f"save() returned {saved!r:.80}; it must be a Checkpoint")
            hold(saved.step == 2, f"save() after two steps says step {saved.step}")
            await self._export(trainer, third)
            return saved, samples, expected
        finally:
            await self._call("close", trainer.close())

    async def second_life(self, saved: Checkpoint, samples: Sequence[Sample], expected: FloatArray) -> None:
        """Resume in another trainer, where the policy must be the saved one, and training go on."""
        trainer: Any = self.spec.make(self.config)
        try:
            ref = await self._call("start", trainer.start(self._run(1), saved))
            hold(
                (ref.step, ref.lineage) == (2, 1),
                f"resumed from step 2 in lineage 1, start() gave step {ref.step} of lineage {ref.lineage}",
            )
            policy = await self._open(ref)
            prompt = self._prompt(policy)
            found = await self._scored(policy, prompt, samples)
            hold(
                np.allclose(found, expected, atol=self.tolerance),
                "the resumed policy is not the saved one: its log-probabilities of the same tokens differ by up to "
                f"{np.abs(found - expected).max():.3g}",
            )
            await self._step(trainer, prompt, await self._samples(policy, prompt, seed=4), ref)
        finally:
            await self._call("close", trainer.close())

    def _run(self, lineage: int) -> RunSpec:
        return RunSpec(
            name="check",
            folder=self.folder,
            config=self.config,
            model=self.model,
            seed=0,
            deterministic=True,
            lineage=lineage,
            say=lambda text: None,
        )

    async def _call(self, name: str, work: Any) -> Any:
        try:
            async with asyncio.timeout(self.timeout):
                return await work
        except TimeoutError:
            raise ContractViolated(f"{name}() did not return within {self.timeout:g} s") from None

    async def _open(self, ref: PolicyRef) -> Any:
        policy: Any = await self._call("open_policy", self.spec.open_policy(ref, self.config))
        hold(policy.ref == ref, f"open_policy({ref}) gave a policy whose ref is {policy.ref}")
        return policy

    def _prompt(self, policy: Any) -> Any:
        return np.asarray(policy.tokenizer().encode(PROMPT), np.int32)

    async def _samples(self, policy: Any, prompt: Any, seed: int) -> list[Sample]:
        params = SamplingParams(LENGTH, seed=seed)
        samples: list[Sample] = await self._call("sample", policy.sample(prompt, params, SIZE))
        hold(len(samples) == SIZE, f"sample(n={SIZE}) returned {len(samples)} samples")
        for sample in samples:
            tokens, logprobs = sample.tokens, sample.logprobs
            hold(
                tokens.shape == logprobs.shape and tokens.ndim == 1 and 1 <= len(tokens) <= LENGTH,
                f"a sample of at most {LENGTH} tokens has tokens {tokens.shape} and logprobs {logprobs.shape}",
            )
            hold(sample.ref == policy.ref, f"a sample of {policy.ref} says that it is of {sample.ref}")
            hold(
                sample.stop_reason in ("stop", "length") and (sample.stop_reason == "stop" or len(tokens) == LENGTH),
                f"a sample of {len(tokens)} of {LENGTH} tokens says that it ended by {sample.stop_reason!r}",
            )
        claimed = np.concatenate([sample.logprobs for sample in samples])
        scored = await self._scored(policy, prompt, samples)
        hold(
            np.allclose(claimed, scored, atol=self.tolerance),
            "the log-probabilities of sampled tokens differ from what logprobs() says of them by up to "
            f"{np.abs(claimed - scored).max():.3g}; both must be raw, at temperature 1",
        )
        return samples

    async def _scored(self, policy: Any, prompt: Any, samples: Sequence[Sample]) -> FloatArray:
        rows = []
        for sample in samples:
            tokens = np.concatenate([prompt, sample.tokens])
            scored = await self._call("logprobs", policy.logprobs(tokens))
            hold(
                len(scored) == len(tokens) and math.isnan(float(scored[0])),
                f"logprobs() of {len(tokens)} tokens must give as many numbers, NaN for the first; got {scored!r:.80}",
            )
            rows.append(np.asarray(scored[len(prompt) :], np.float32))
        return np.concatenate(rows)

    async def _step(self, trainer: Any, prompt: Any, samples: Sequence[Sample], ref: PolicyRef) -> PolicyRef:
        trajectories = []
        for place, sample in enumerate(samples):
            tokens = np.concatenate([prompt, sample.tokens]).astype(np.int32)
            mask = np.arange(len(tokens)) >= len(prompt)
            logprobs = np.concatenate([np.zeros(len(prompt), np.float32), sample.logprobs]).astype(np.float32)
            segment = Segment(tokens, logprobs, mask)
            trajectories.append(Trajectory((segment,), (float(place % 2),), (sample.stop_reason,), (sample.ref,), ()))
        group = Group(f"{ref.lineage}-{ref.step:06d}", TaskRef("train", ref.step, 0), tuple(trajectories))
        update = await self._call("update", trainer.update(Batch(ref.step, (group,))))
        hold(
            (update.ref.step, update.ref.lineage) == (ref.step + 1, ref.lineage),
            f"update() at step {ref.step} gave a policy of step {update.ref.step}, lineage {update.ref.lineage}",
        )
        wanted = [[[segment.tokens.shape for segment in t.segments] for t in group.trajectories]]
        given = [[[np.shape(row) for row in t] for t in of_group] for of_group in update.advantages]
        hold(given == wanted, f"update() returned advantages of the shapes {given}; what was trained on has {wanted}")
        broken = {name: value for name, value in update.metrics.items() if not math.isfinite(value)}
        hold(not broken, f"update() returned metrics that are not finite: {broken}")
        return update.ref  # type: ignore[no-any-return]

    async def _export(self, trainer: Any, ref: PolicyRef) -> None:
        to = await self._call("export", trainer.export(ref, self.folder / "exported"))
        hold(
            Path(to).is_dir() and any(Path(to).iterdir()), f"export() returned {str(to)!r}, where there are no weights"
        )
