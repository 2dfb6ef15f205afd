"""Evaluation of a control policy: whole episodes with the mode action."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tinker_atropos.control import ControlPolicy
from tinker_atropos.errors import RunError
from tinker_atropos.rollout.fragments import Actor
from tinker_atropos.rollout.simulations import SOUND, Shape, ShardArrays, Simulations

MOST_STEPS = 1_000_000  # of one evaluation: an environment whose episodes never end must not hang a run


@dataclass(frozen=True, slots=True)
class ControlEvaluation:
    """The episodes of an evaluation, as (return, length), in the order of their simulations."""

    episodes: tuple[tuple[float, int], ...]

    def metrics(self) -> dict[str, float]:
        """Return mean and spread (the standard deviation over episodes) of the return, and the mean length."""
        returns = [total for total, _ in self.episodes]
        return {
            "eval/return": float(np.mean(returns)),
            "eval/return_std": float(np.std(returns)),
            "eval/length": float(np.mean([length for _, length in self.episodes])),
            "eval/episodes": float(len(self.episodes)),
        }


def evaluate_control(
    environment: Any,
    name: str,
    policy: ControlPolicy,
    actor: Actor,
    shape: Shape,
    *,
    episodes: int,
    seed: int,
    stop: threading.Event,
) -> ControlEvaluation | None:
    """Play `episodes` whole episodes with the mode action; None if `stop` was set before they ended.

    Each simulation plays its share of them: taking whichever ends first would prefer short ones. Blocking.
    """
    n = shape.num_envs
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    arrays = ShardArrays.made(shape)
    simulations = Simulations(environment, name, arrays)
    chosen, logprobs = np.zeros_like(arrays.actions), np.zeros(n, np.float32)
    returns, lengths = np.zeros(n), np.zeros(n, np.int64)
    played: list[list[tuple[float, int]]] = [[] for _ in range(n)]
    simulations.reset(seed)
    for _ in range(MOST_STEPS // n):
        if stop.is_set():
            return None
        if actor.choose(policy, arrays.observations, None, chosen, logprobs) is not None:
            raise RunError(f"the policy of step {policy.ref.step} gave NaN actions in an evaluation")
        actor.to_space(chosen, arrays.actions)
        simulations.step()
        returns += arrays.rewards
        lengths += 1
        ended = arrays.terminated | arrays.truncated
        if not ended.any():
            continue
        for i in np.flatnonzero(ended & (arrays.causes == SOUND)):  # one cut off by a NaN is played again
            if len(played[i]) < share[i]:
                played[i].append((float(returns[i]), int(lengths[i])))
        returns[ended], lengths[ended] = 0.0, 0
        if all(len(done) == wanted for done, wanted in zip(played, share, strict=True)):
            return ControlEvaluation(tuple(episode for done in played for episode in done))
    raise RunError(
        f"environment {name!r}: {episodes} evaluation episodes did not end within {MOST_STEPS:,} steps; give it a time "
        "limit, or turn evaluations off with env.steps_per_eval=0"
    )
