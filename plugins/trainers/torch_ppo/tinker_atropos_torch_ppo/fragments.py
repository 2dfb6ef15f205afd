"""Checks the fragments of a batch before they are learned from: one bad number would spoil all weights after it."""

from __future__ import annotations

import numpy as np
from tinker_atropos.control import ControlBatch, Fragment
from tinker_atropos.errors import TrainerError

from tinker_atropos_torch_ppo.spaces import Shape


def check_batch(batch: ControlBatch, shape: Shape, step: int, minibatches: int) -> None:
    """Raise `TrainerError` for a batch of another step, of other shapes or with numbers that are not finite."""
    if batch.step != step:
        raise TrainerError(
            f"the batch is for step {batch.step}, the trainer is at step {step}; resume from a checkpoint"
        )
    steps = sum(fragment.steps for fragment in batch.fragments)
    if steps < 2 * minibatches:
        raise TrainerError(
            f"the batch of step {step} has {steps} environment steps, too few for torch_ppo.minibatches={minibatches} "
            "of two or more; lower it, or raise torch_ppo.steps_per_update"
        )
    for fragment in batch.fragments:
        _check_shapes(fragment, shape)
        _check_numbers(fragment)


def _check_shapes(fragment: Fragment, shape: Shape) -> None:
    steps, width = fragment.rewards.shape
    action = (steps, width) if shape.discrete else (steps, width, shape.actions)
    ends = int((fragment.terminated | fragment.truncated).sum())
    wanted = {
        "observations": (steps + 1, width, *shape.observation),
        "actions": action,
        "logprobs": (steps, width),
        "terminated": (steps, width),
        "truncated": (steps, width),
        "finals": (ends, *shape.observation),
    }
    for name, right in wanted.items():
        found = getattr(fragment, name).shape
        if found != right and not (name == "finals" and ends == 0):
            raise TrainerError(
                f"fragment {fragment.id}: {name} have shape {found}, {right} is right for {steps} steps of {width} "
                f"simulations of {shape.task} with {ends} ends; repair the rollout"
            )


def _check_numbers(fragment: Fragment) -> None:
    for name in ("observations", "actions", "logprobs", "rewards", "finals"):
        array = getattr(fragment, name)
        if np.isfinite(array).all():
            continue
        where = np.argwhere(~np.isfinite(array))[0].tolist()
        place = f"[{where[0]}]" if name == "finals" else f"at step {where[0]} of simulation {where[1]}"
        raise TrainerError(
            f"fragment {fragment.id}: {name} {place} are not finite, so nothing can be learned from them; repair the "
            "environment or reset that simulation, then continue with --resume"
        )
