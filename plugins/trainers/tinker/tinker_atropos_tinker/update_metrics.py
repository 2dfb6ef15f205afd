"""What one update tells about itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tinker_atropos.errors import TrainerError
from tinker_atropos.trajectory import FloatArray

from tinker_atropos_tinker.datums import NO_TRAINED_TOKEN, TOO_LONG, PolicyDatum, TrainingData


def update_metrics(
    data: TrainingData,
    trained: Sequence[FloatArray],
    reported: Mapping[str, float],
    probed: Mapping[int, FloatArray] | None = None,
) -> dict[str, float]:
    """Return the metrics of one forward and backward pass.

    `trained[i] float32[T]` are the trainer's log-probabilities of datum `i`'s targets, `reported` is what the service
    says of the pass, named `name:reduction`, `probed[i] float32[T]` what a sampler of the very weights of the pass says
    of datum `i`'s targets. Over the trained tokens, with `d = sampler's logprob - trainer's`:

    - `loss`: the sum over tokens that Tinker minimises, divided by the number of trained tokens;
    - `train/kl_sample_train_v1` mean of d, `train/kl_sample_train_v2` half the mean of d² (Schulman's k1 and k2);
    - `train/logprob_mismatch_mean`, `_max`: of |d|, in nats, where nothing but the two engines' arithmetic may differ:
      over the trajectories that the current policy sampled whole, and those that were probed; absent without either;
    - `train/ratio_mean`, `_min`, `_max`: of exp(-d), the importance ratio;
    - `train/entropy_sample`: minus the mean of the sampler's log-probabilities;
    - `train/advantage_zero`: the share of datums that teach nothing because every advantage is zero.
    """
    _check_shapes(data.datums, trained)
    masks = [datum.mask for datum in data.datums]
    sampled = np.concatenate([datum.logprobs[mask] for datum, mask in zip(data.datums, masks, strict=True)])
    own = np.concatenate([logprobs[mask] for logprobs, mask in zip(trained, masks, strict=True)])
    difference = sampled.astype(np.float64) - own
    ratio = np.exp(-difference)
    metrics = {
        "loss": _loss(data.datums, trained, reported) / data.tokens,
        "train/tokens": float(data.tokens),
        "train/datums": float(len(data.datums)),
        "train/left_out_no_trained_token": float(data.left_out.get(NO_TRAINED_TOKEN, 0)),
        "train/left_out_too_long": float(data.left_out.get(TOO_LONG, 0)),
        "train/kl_sample_train_v1": float(difference.mean()),
        "train/kl_sample_train_v2": float(0.5 * np.square(difference).mean()),
        "train/ratio_mean": float(ratio.mean()),
        "train/ratio_min": float(ratio.min()),
        "train/ratio_max": float(ratio.max()),
        "train/entropy_sample": float(-sampled.mean()),
        "train/advantage_zero": _zero_share(data.datums),
    }
    mismatch = _mismatch(data.datums, trained, probed or {})
    if mismatch.size:
        metrics["train/logprob_mismatch_mean"] = float(mismatch.mean())
        metrics["train/logprob_mismatch_max"] = float(mismatch.max())
    return metrics


def to_probe(data: TrainingData, most: int) -> list[int]:
    """Return which datums to probe: where every trajectory is stale, the first few, so that each step has a figure."""
    if any(datum.fresh for datum in data.datums):
        return []
    return list(range(min(most, len(data.datums))))


def _mismatch(
    datums: Sequence[PolicyDatum], trained: Sequence[FloatArray], probed: Mapping[int, FloatArray]
) -> NDArray[np.float64]:
    """Return |sampler's - trainer's| log-probability of every token that one policy has scored both ways."""
    parts = [np.zeros(0)]
    for place, (datum, own) in enumerate(zip(datums, trained, strict=True)):
        said = probed.get(place, datum.logprobs if datum.fresh else None)
        if said is not None:
            parts.append(np.abs(said[datum.mask].astype(np.float64) - own[datum.mask]))
    return np.concatenate(parts)


def importance_sampling_loss(datums: Sequence[PolicyDatum], trained: Sequence[FloatArray]) -> float:
    """Return `-sum(exp(trainer's logprob - sampler's) * advantage)` over all tokens of all datums."""
    return -sum(
        float(np.sum(np.exp(logprobs.astype(np.float64) - datum.logprobs)[datum.mask] * datum.advantages[datum.mask]))
        for datum, logprobs in zip(datums, trained, strict=True)
    )


def _loss(datums: Sequence[PolicyDatum], trained: Sequence[FloatArray], reported: Mapping[str, float]) -> float:
    """The service's own figure; where it names none, the same by the loss's definition."""
    own = reported.get("loss:sum")
    return importance_sampling_loss(datums, trained) if own is None else float(own)


def _zero_share(datums: Sequence[PolicyDatum]) -> float:
    return sum(not datum.advantages.any() for datum in datums) / len(datums)


def grad_norm(step: Mapping[str, float]) -> dict[str, float]:
    """Return `train/grad_norm`, before clipping, where the service's report on an optimiser step has it."""
    for name, value in step.items():
        if name.split(":")[0] in ("unclipped_grad_l2", "grad_norm"):
            return {"train/grad_norm": float(value)}
    return {}


def _check_shapes(datums: Sequence[PolicyDatum], trained: Sequence[FloatArray]) -> None:
    shapes = [datum.targets.shape for datum in datums]
    if [logprobs.shape for logprobs in trained] != shapes:
        raise TrainerError(
            f"the service returned log-probabilities for {len(trained)} datums where {len(shapes)} were sent, or of "
            "other lengths; it does not speak the protocol of tinker 0.38"
        )
