"""One text episode, from reset to its trajectory. Knows no trainer; tokens are the session's business."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinker_atropos.adapter import Prompt, SessionFactory, TextSession
from tinker_atropos.environment import MAX_REWARD, Episode, Step
from tinker_atropos.errors import ContextOverflow, DataError
from tinker_atropos.trajectory import FinishReason, PolicyRef, Sample, SamplingParams, Stop, TaskRef, Trajectory

log = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0

Ask: TypeAlias = Callable[[Prompt, int], Awaitable[Sample]]
"""Samples one turn: the exact prompt and the number of the turn."""


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Bounds of an episode. `max_tokens` are new tokens per turn; None: all the room there is."""

    max_tokens: int | None
    max_turns: int
    context_length: int | None
    context_overflow: Literal["truncate", "drop"]


async def run_episode(
    environment: Any,
    task: TaskRef,
    sessions: SessionFactory,
    tokenizer: Any,
    ask: Ask,
    limits: EpisodeLimits,
    *,
    stop: Stop = None,
) -> Trajectory:
    """Roll out one episode; the environment's episode is closed whatever happens.

    Raises what the environment raises, `DataError` for a step that is none or a reward that is not finite, and
    `ContextOverflow` where the prompt leaves no room and the policy for that is `drop` (or it is the first turn).
    """
    episode: Episode = await environment.episode(task)
    try:
        session = sessions.open(tokenizer, stop=stop, context_length=limits.context_length)
        return await _play(episode, session, ask, limits)
    finally:
        await _close(episode)


async def _close(episode: Episode) -> None:
    """Close an episode; one that fails or hangs in it is named, and takes nothing with it."""
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await episode.close()
    except Exception as error:
        log.warning("close() of an episode failed: %s: %s", type(error).__name__, error)


async def _play(episode: Episode, session: TextSession, ask: Ask, limits: EpisodeLimits) -> Trajectory:
    rewards: list[float] = []
    finish_reasons: list[FinishReason] = []
    policies: list[PolicyRef] = []
    metrics: dict[str, float] = {}
    truncated = False
    step = _checked(await episode.reset(), "reset")
    while not step.done:
        if len(rewards) >= limits.max_turns:
            truncated = True
            break
        session.observe(step.observation, step.tools)
        try:
            # Where the policy is behind HTTP only it knows how much room there is.
            sample = await ask(session.prompt(limits.max_tokens), len(rewards))
        except ContextOverflow:
            if limits.context_overflow == "drop" or not rewards:
                raise
            truncated = True
            break
        completion = session.record(sample)
        step = _checked(await episode.step(completion), "step")
        rewards.append(float(step.reward))
        finish_reasons.append(completion.finish_reason)
        policies.append(sample.ref)
        metrics |= {name: float(value) for name, value in step.metrics.items()}
    if not rewards:
        raise DataError("an episode ended at reset; an environment must ask the policy for one turn at least")
    transcript = session.transcript()
    return Trajectory(
        segments=transcript.segments,
        rewards=tuple(rewards),
        finish_reasons=tuple(finish_reasons),
        policies=tuple(policies),
        messages=transcript.messages,
        metrics=metrics,
        masked=transcript.masked,
        truncated=truncated or step.truncated,
    )


def _checked(step: Any, method: str) -> Step:
    if not isinstance(step, Step):
        raise DataError(f"{method}() returned {type(step).__name__}; expected a Step(observation, reward, …)")
    numbers: Mapping[str, Any] = {"reward": step.reward, **step.metrics}
    for name, value in numbers.items():
        if isinstance(value, bool):
            continue
        try:
            finite = math.isfinite(value) and abs(value) <= MAX_REWARD
        except (TypeError, OverflowError):
            finite = False
        if not finite:
            raise DataError(f"{method}() returned {name} = {value!r}; expected a finite number")
    return step


def sampling_params(prompt: Prompt, *, temperature: float, top_p: float, top_k: int, seed: int) -> SamplingParams:
    """Return the sampler's parameters for a prompt."""
    return SamplingParams(
        max_tokens=prompt.max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, stop=prompt.stop, seed=seed
    )
