"""A posted group as a `Group` of ours: which of its tokens are proven, and what its fields mean to a trainer.

What is trained on is what the policy is known to have sampled. The poster's mask says what it wants trained; a token of
it that the endpoint did not sample is masked out and counted as `unproven`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tinker_atropos.external import Proven
from tinker_atropos.trajectory import (
    BoolArray,
    FinishReason,
    FloatArray,
    Group,
    IntArray,
    PolicyRef,
    Segment,
    TaskRef,
    Trajectory,
)

from tinker_atropos_atropos.posted import Posted

UNTRAINED = -100
_STOPPED: tuple[FinishReason, ...] = ("stop",)
TOLERANCE = 1e-3
"""How far a posted log-probability may be from the sampler's before it counts as another one."""


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """The group; why it can't be trained on, or None; and tokens by what befell them (`masked`, `counts`)."""

    group: Group
    discard: str | None
    counts: Counter[str]


def trained_mask(masks: Sequence[int], tokens: IntArray) -> BoolArray:
    """Return `bool[T]`: where the poster wants training.

    Labels are the token's id where trained and -100 elsewhere. Some environments post 0 and 1 instead; 0 then means
    untrained, unless the labels are the tokens themselves.
    """
    labels = np.asarray(masks, dtype=np.int32)
    if labels.min() >= 0 and labels.max() <= 1 and not np.array_equal(labels, tokens):
        return np.asarray(labels == 1)
    return np.asarray(labels != UNTRAINED)


def to_group(
    posted: Posted,
    *,
    id: str,
    task: TaskRef,
    prove: Callable[[IntArray], Proven],
    newest: PolicyRef | None = None,
    trust_inference_logprobs: bool = False,
) -> Converted:
    """Return a checked group as the trainer takes it.

    `trust_inference_logprobs` lets posted log-probabilities stand for tokens that were sampled elsewhere; they then
    count as sampled from `newest`.
    """
    counts: Counter[str] = Counter()
    trajectories = tuple(
        _trajectory(posted, index, prove, newest if trust_inference_logprobs else None, counts)
        for index in range(len(posted.tokens))
    )
    group = Group(id=id, task=task, trajectories=trajectories, overrides=_overrides(posted))
    return Converted(group, _why_not(posted, group, counts), counts)


def _why_not(posted: Posted, group: Group, counts: Counter[str]) -> str | None:
    if any(len(row) != len(tokens) for row, tokens in zip(posted.advantages or (), posted.tokens, strict=False)):
        return "advantages are not one a token"
    if any(trajectory.sampled_tokens for trajectory in group.trajectories):
        return None
    return "unproven" if counts["unproven"] else "nothing to train on"


def _trajectory(
    posted: Posted,
    index: int,
    prove: Callable[[IntArray], Proven],
    trusted: PolicyRef | None,
    counts: Counter[str],
) -> Trajectory:
    tokens = np.asarray(posted.tokens[index], dtype=np.int32)
    wanted = trained_mask(posted.masks[index], tokens)
    proven = prove(tokens)
    mask = wanted & proven.mask
    logprobs = np.where(mask, proven.logprobs, np.float32(0)).astype(np.float32)
    own = np.asarray(posted.inference_logprobs[index], dtype=np.float32) if posted.inference_logprobs else None
    unproven = wanted & ~proven.mask
    policies = proven.policies
    metrics: dict[str, float] = {}
    if own is not None:
        disagree = int((mask & (np.abs(own - logprobs) > TOLERANCE)).sum())
        if disagree:
            metrics["logprobs_disagree"] = disagree
            counts["logprobs_disagree"] += disagree
        if trusted is not None:
            # 1.0 is the placeholder of tokens that were not sampled.
            taken = unproven & (own <= 0) & np.isfinite(own)
            logprobs = np.where(taken, own, logprobs).astype(np.float32)
            mask, unproven = mask | taken, unproven & ~taken
            if taken.any():
                counts["trusted"] += int(taken.sum())
                policies = policies or (trusted,)
    masked = {"unproven": int(unproven.sum())} if unproven.any() else {}
    counts.update(masked)
    counts["trained"] += int(mask.sum())
    turns = max(1, len(policies))
    reasons = proven.finish_reasons if len(proven.finish_reasons) == turns else _STOPPED * turns
    return Trajectory(
        segments=(Segment(tokens, logprobs, mask, _advantages(posted, index, len(tokens))),),
        rewards=(0.0,) * (turns - 1) + (float(posted.scores[index]),),
        finish_reasons=reasons,
        policies=policies,
        messages=tuple(posted.messages[index]) if posted.messages else (),
        metrics=metrics,
        masked=masked,
    )


def _advantages(posted: Posted, index: int, length: int) -> FloatArray | None:
    overrides = posted.overrides or []
    if index < len(overrides) and overrides[index].get("set_advantage_to_zero"):
        return np.zeros(length, dtype=np.float32)
    if posted.advantages and len(posted.advantages[index]) == length:
        return np.asarray(posted.advantages[index], dtype=np.float32)
    return None


def _overrides(posted: Posted) -> dict[str, Any]:
    """Return what stands beside the sequences.

    `group_overrides` as they came; `overrides` (one mapping a sequence) and `generation_params` under their names;
    `distill_token_ids` (`int32[T, K]` a sequence, or lists where K varies) and `distill_logprobs` (`float32`, alike).
    """
    found = dict(posted.group_overrides or {})
    if posted.overrides and any(posted.overrides):
        found["overrides"] = tuple(posted.overrides)
    if posted.generation_params:
        found["generation_params"] = posted.generation_params
    if posted.distill_token_ids and posted.distill_logprobs:
        found["distill_token_ids"] = tuple(_rows(rows, np.int32) for rows in posted.distill_token_ids)
        found["distill_logprobs"] = tuple(_rows(rows, np.float32) for rows in posted.distill_logprobs)
    return found


def _rows(rows: Sequence[Sequence[float]], kind: type[np.generic]) -> Any:
    if len({len(row) for row in rows}) > 1:
        return [list(row) for row in rows]
    return np.asarray(rows, dtype=kind)


def has_images(posted: Posted) -> bool:
    """Return whether a group carries any image."""
    images = posted.images
    if isinstance(images, list):
        return any(image is not None and image != [] for image in images)
    return bool(images)
