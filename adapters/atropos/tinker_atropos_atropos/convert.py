"""A posted group as a `Group` of ours: which of its tokens are proven, and what its fields mean to a trainer.

What is trained on is what the policy is known to have sampled. The poster's mask says what it wants trained; a token of
it that the endpoint did not sample is masked out and counted as `unproven`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tinker_atropos.external import Proven
from tinker_atropos.rollout.external import REFUSED
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

Prove: TypeAlias = Callable[[IntArray, FloatArray | None], Proven]
"""A `PolicyEndpoint.prove`: what is known of tokens `int32[T]` and, where posted, log-probabilities `float32[T]`."""

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
    prove: Prove,
    newest: PolicyRef | None = None,
    trust_inference_logprobs: bool = False,
) -> Converted:
    """Return a checked group as the trainer takes it.

    `prove` is given each sequence with its posted log-probabilities, which tell equal turns of several policies apart.
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
    prove: Prove,
    trusted: PolicyRef | None,
    counts: Counter[str],
) -> Trajectory:
    tokens = np.asarray(posted.tokens[index], dtype=np.int32)
    wanted = trained_mask(posted.masks[index], tokens)
    own = np.asarray(posted.inference_logprobs[index], dtype=np.float32) if posted.inference_logprobs else None
    proven = prove(tokens, own)
    mask = wanted & proven.mask
    logprobs = np.where(mask, proven.logprobs, np.float32(0)).astype(np.float32)
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
    advantages = _advantages(posted, index, len(tokens))
    if advantages is None and posted.distill_token_ids and posted.distill_logprobs:
        advantages, known = distillation(
            tokens, logprobs, posted.distill_token_ids[index], posted.distill_logprobs[index]
        )
        if (mask & ~known).any():
            masked["no_teacher_logprob"] = int((mask & ~known).sum())
            counts["no_teacher_logprob"] += masked["no_teacher_logprob"]
        mask = mask & known
        advantages = np.where(mask, advantages, np.float32(0)).astype(np.float32)
        logprobs = np.where(mask, logprobs, np.float32(0)).astype(np.float32)
    turns = max(1, len(policies))
    counts["trained"] += int(mask.sum())
    reasons = proven.finish_reasons if len(proven.finish_reasons) == turns else _STOPPED * turns
    return Trajectory(
        segments=(Segment(tokens, logprobs, mask, advantages),),
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

    `group_overrides` as they came; `overrides` (one mapping a sequence) and `generation_params` under their names.
    """
    found = {key: value for key, value in (posted.group_overrides or {}).items() if key != REFUSED}  # the run's own
    if posted.overrides and any(posted.overrides):
        found["overrides"] = tuple(posted.overrides)
    if posted.generation_params:
        found["generation_params"] = posted.generation_params
    return found


def distillation(
    tokens: IntArray, logprobs: FloatArray, ids: Sequence[Sequence[int]], teacher: Sequence[Sequence[float]]
) -> tuple[FloatArray, BoolArray]:
    """Return per-token advantages of on-policy distillation, `float32[T]`, and where the teacher said what it takes.

    The advantage of a sampled token is the teacher's log-probability of it minus the sampler's: the negative of the
    reverse KL divergence's sample at that token (Agarwal et al. 2024, "On-Policy Distillation of Language Models"). Row
    t of `ids` and `teacher` is of position t; of its K entries the one of the sampled token counts, and a token that is
    not among them is not known.
    """
    advantages, known = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.bool_)
    for place, token in enumerate(tokens.tolist()):
        if token in ids[place]:
            advantages[place] = teacher[place][ids[place].index(token)] - logprobs[place]
            known[place] = True
    return advantages, known


def has_images(posted: Posted) -> bool:
    """Return whether a group carries any image."""
    images = posted.images
    if isinstance(images, list):
        return any(image is not None and image != [] for image in images)
    return bool(images)
