"""Plays one episode, with a policy over exact tokens or over an endpoint's HTTP; both ask one sample a turn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tinker_atropos.adapter import Prompt, SessionFactory
from tinker_atropos.evaluation.endpoint import EndpointClient, Reply, retrying
from tinker_atropos.evaluation.endpoint_session import EndpointSession, OneSession
from tinker_atropos.evaluation.turns import Turns
from tinker_atropos.rollout.episode import EpisodeLimits, run_episode, sampling_params
from tinker_atropos.trainer import TextPolicy
from tinker_atropos.trajectory import PolicyRef, Sample, Stop, TaskRef, Trajectory


@dataclass(frozen=True, slots=True)
class Sampling:
    """How every turn is sampled. `stop` is the environment's."""

    temperature: float
    top_p: float
    top_k: int
    stop: Stop
    limits: EpisodeLimits
    retries: int


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """A whole episode; tokens over all its turns, None where nobody counted them.

    `finishes` are the turns' finish reasons in the model's own words.
    """

    trajectory: Trajectory
    prompt_tokens: int | None
    sampled_tokens: int | None
    finishes: tuple[str, ...]


class Player(Protocol):
    """Plays episodes with one model."""

    async def play(self, environment: Any, task: TaskRef, turns: Turns) -> Played:
        """Play one; raises what the environment raises, and what asking raises."""
        ...


class PolicyPlayer:
    """Plays with a `TextPolicy`: prompts are rendered here."""

    def __init__(
        self, policy: TextPolicy, tokenizer: Any, sessions: SessionFactory, sampling: Sampling, say: Any
    ) -> None:
        self._policy, self._tokenizer, self._sessions = policy, tokenizer, sessions
        self._sampling, self._say = sampling, say

    async def play(self, environment: Any, task: TaskRef, turns: Turns) -> Played:
        """Play one episode in exact tokens."""
        sampling, policy = self._sampling, self._policy
        counted = [0, 0]

        async def ask(prompt: Prompt, turn: int) -> Sample:
            seed = turns.seed(turn)
            params = sampling_params(
                prompt, temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed
            )

            async def once() -> Mapping[str, Any]:
                (sample,) = await policy.sample(prompt.tokens, params, 1)
                return {
                    "tokens": sample.tokens.tolist(),
                    # JSON has no NaN; whoever lacks a log-probability says so with one.
                    "logprobs": [value if math.isfinite(value) else None for value in sample.logprobs.tolist()],
                    "stop_reason": sample.stop_reason,
                }

            question = [prompt.tokens.tolist(), prompt.max_tokens, prompt.stop, seed]
            found = await turns.answer(turn, question, lambda: retrying(once, sampling.retries, self._say))
            counted[0] += len(prompt.tokens)
            counted[1] += len(found["tokens"])
            return Sample(
                np.asarray(found["tokens"], np.int32),
                np.asarray(found["logprobs"], np.float32),
                found["stop_reason"],
                policy.ref,
            )

        trajectory = await run_episode(
            environment, task, self._sessions, self._tokenizer, ask, sampling.limits, stop=sampling.stop
        )
        return Played(trajectory, counted[0], counted[1], tuple(trajectory.finish_reasons))


class EndpointPlayer:
    """Plays over HTTP: the endpoint renders. `extra` goes into every request as it is."""

    def __init__(self, client: EndpointClient, sampling: Sampling, extra: Mapping[str, Any]) -> None:
        self._client, self._sampling, self._extra = client, sampling, dict(extra)

    async def play(self, environment: Any, task: TaskRef, turns: Turns) -> Played:
        """Play one episode in messages, or in text."""
        sampling, client = self._sampling, self._client
        session = EndpointSession(sampling.stop)
        replies: list[Reply] = []
        ref = PolicyRef(client.model, 0, 0, f"{client.subject.url}#{client.model}", endpoint=client.subject.url)

        async def ask(prompt: Prompt, turn: int) -> Sample:
            path, question = session.request()
            body = {**question, "temperature": sampling.temperature, "seed": turns.seed(turn)}
            if sampling.top_p != 1.0:
                body["top_p"] = sampling.top_p
            if sampling.top_k != -1:
                body["top_k"] = sampling.top_k
            body |= self._extra

            async def once() -> Mapping[str, Any]:
                return (await client.ask(path, body)).as_dict()

            reply = Reply.from_dict(await turns.answer(turn, [path, body], once))
            replies.append(reply)
            return session.take(reply, ref)

        trajectory = await run_episode(
            environment, task, OneSession(session), None, ask, sampling.limits, stop=sampling.stop
        )
        return Played(
            trajectory,
            _total([reply.prompt_tokens for reply in replies]),
            _total([reply.sampled_tokens for reply in replies]),
            tuple(session.finishes),
        )


def _total(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
