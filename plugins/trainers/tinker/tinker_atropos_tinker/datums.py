"""From segments to what the service trains on. Pure; only `to_tinker` knows the SDK's types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tinker_atropos.advantages import Estimator, token_advantages
from tinker_atropos.errors import TrainerError
from tinker_atropos.trajectory import Batch, BoolArray, FloatArray, IntArray, Segment

if TYPE_CHECKING:
    import tinker

NO_TRAINED_TOKEN = "no trained token"
TOO_LONG = "too long"


@dataclass(frozen=True, slots=True, eq=False)
class PolicyDatum:
    """One segment of `T + 1` tokens, shifted for next-token prediction; every array has length `T`.

    `targets[i]` follows `inputs[i]`; `logprobs` and `advantages` belong to the targets and are 0 where `mask` is False.
    `fresh`: every turn of its trajectory was sampled by the policy that is being updated.
    """

    inputs: IntArray
    targets: NDArray[np.int64]
    logprobs: FloatArray
    advantages: FloatArray
    mask: BoolArray
    fresh: bool


@dataclass(frozen=True, slots=True, eq=False)
class TrainingData:
    """What a batch becomes: `datums` in the batch's order, and what was left out, counted by reason.

    `advantages[g][t][s]` is `float32[T]` beside the segment, zero throughout where the segment was left out.
    """

    datums: tuple[PolicyDatum, ...]
    advantages: list[list[list[FloatArray]]]
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """How many tokens are trained on."""
        return int(sum(int(datum.mask.sum()) for datum in self.datums))


def reason_left_out(segment: Segment, longest: int | None) -> str | None:
    """Return why a segment is not trained on, None where it is. `longest` is the trainer's limit in tokens."""
    if longest is not None and len(segment.tokens) > longest:
        return TOO_LONG
    return None if segment.mask.any() else NO_TRAINED_TOKEN


def policy_datum(segment: Segment, advantages: FloatArray, *, fresh: bool) -> PolicyDatum:
    """Return the datum of one segment; `advantages float32[T]` are zero where the segment's mask is False.

    The first token can't be a target, nothing predicts it: raises `TrainerError` where it is marked as sampled, and
    where a trained token's log-probability is not finite.
    """
    if segment.mask[0]:
        raise TrainerError(
            "a segment's first token is marked as sampled; nothing precedes it, so it can't be trained on. A prompt of "
            "one token at least must come before it"
        )
    mask = segment.mask[1:]
    if not np.isfinite(segment.logprobs[1:][mask]).all():
        raise TrainerError("a trained token has a log-probability that is not finite; the sampler's answer is broken")
    return PolicyDatum(
        inputs=segment.tokens[:-1],
        targets=segment.tokens[1:].astype(np.int64),
        logprobs=np.where(mask, segment.logprobs[1:], np.float32(0)).astype(np.float32),
        advantages=np.where(mask, advantages[1:], np.float32(0)).astype(np.float32),
        mask=mask,
        fresh=fresh,
    )


def training_data(batch: Batch, estimator: Estimator, longest: int | None) -> TrainingData:
    """Return the batch as datums. A group whose trajectories score alike is kept: its advantages are zero."""
    datums: list[PolicyDatum] = []
    left_out: Counter[str] = Counter()
    advantages = [token_advantages(group, estimator) for group in batch.groups]
    for group, of_group in zip(batch.groups, advantages, strict=True):
        for trajectory, of_trajectory in zip(group.trajectories, of_group, strict=True):
            fresh = all(ref.step == batch.step for ref in trajectory.policies)
            for place, segment in enumerate(trajectory.segments):
                reason = reason_left_out(segment, longest)
                if reason is None:
                    datums.append(policy_datum(segment, of_trajectory[place], fresh=fresh))
                else:
                    left_out[reason] += 1
                    of_trajectory[place] = np.zeros_like(of_trajectory[place])
    return TrainingData(tuple(datums), advantages, dict(left_out))


def to_tinker(datums: Sequence[PolicyDatum]) -> list[tinker.Datum]:
    """Return the SDK's datums for `importance_sampling`: exactly target_tokens, logprobs and advantages, no mask.

    The loss is `-sum(exp(logprob - sampler's logprob) * advantage)` over the targets (Tinker's documentation,
    "Losses"), so a zero advantage is what masks a token; the service refuses a field that the loss does not name.
    """
    from tinker import Datum, ModelInput, TensorData

    return [
        Datum(
            model_input=ModelInput.from_ints(datum.inputs.tolist()),
            loss_fn_inputs={
                "target_tokens": TensorData.from_numpy(datum.targets),
                "logprobs": TensorData.from_numpy(datum.logprobs),
                "advantages": TensorData.from_numpy(datum.advantages),
            },
        )
        for datum in datums
    ]
