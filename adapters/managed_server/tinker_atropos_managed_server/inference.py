"""Samples requests from the newest policy and remembers what was sampled. Knows no HTTP and no dialect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tinker_atropos import ContextOverflow, PolicyUnavailable, Sample, SamplingParams
from tinker_atropos.trajectory import FinishReason, IntArray, PolicyRef

from tinker_atropos_managed_server.answers import NotReady, Refused
from tinker_atropos_managed_server.sampled_turns import SampledTurns
from tinker_atropos_managed_server.sampling_request import SamplingRequest
from tinker_atropos_managed_server.session import Dialect, ManagedSessions
from tinker_atropos_managed_server.turn import Turn, checked_sample, ended_sample, read_turn

if TYPE_CHECKING:
    from tinker_atropos.external import PolicySource
    from tinker_atropos.trainer import TextPolicy


@dataclass(frozen=True, slots=True)
class Choice:
    """One sample: its tokens with the stop, their log-probabilities, and its text as the request wants it."""

    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: FinishReason
    turn: Turn


@dataclass(frozen=True, slots=True)
class Answer:
    """The samples of one prompt, all from the policy `ref`. `prompt_logprobs` begins with NaN; None: not asked for."""

    prompt: IntArray
    choices: list[Choice]
    ref: PolicyRef
    prompt_logprobs: list[float] | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """The policy that a request is answered from, with its tokenizer's dialect."""

    policy: TextPolicy
    dialect: Dialect

    @property
    def ref(self) -> PolicyRef:
        """The policy's name."""
        return self.policy.ref

    @property
    def limit(self) -> int | None:
        """The context length in tokens, None where the policy states none."""
        return self.policy.context_length


class Inference:
    """Runs requests on whatever policy is the newest when they arrive."""

    def __init__(self, sessions: ManagedSessions, source: PolicySource, journal: SampledTurns) -> None:
        self._sessions = sessions
        self._source = source
        self._journal = journal
        self._known: Served | None = None

    @property
    def ready(self) -> bool:
        """Whether there is a policy."""
        return self._source.newest is not None

    @property
    def newest(self) -> PolicyRef | None:
        """The newest policy, None before the first."""
        return self._source.newest

    @property
    def context_length(self) -> int | None:
        """That of the policy used last, in tokens; None where none was used or it states none."""
        return self._known.limit if self._known is not None else None

    def require_newest(self) -> PolicyRef:
        """Return the newest policy; raises `NotReady` where there is none yet."""
        newest = self._source.newest
        if newest is None:
            raise NotReady("there is no policy yet: the trainer has not handed out its first; ask again in a moment")
        return newest

    @asynccontextmanager
    async def served(self) -> AsyncIterator[Served]:
        """Hold the newest policy until the block ends; raises `NotReady` where there is none yet."""
        self.require_newest()
        async with self._source.use() as policy:
            known = self._known
            if known is None or known.policy is not policy:
                # The first time a tokenizer may be read from the disk or a hub.
                tokenizer = await asyncio.to_thread(policy.tokenizer)
                known = self._known = Served(policy, self._sessions.dialect(tokenizer))
            yield known

    async def run(
        self, served: Served, prompts: Sequence[IntArray], requests: Sequence[SamplingRequest], *, score: bool = False
    ) -> list[Answer]:
        """Return the samples of each prompt, in order, as its request says; `score`: with its own log-probabilities.

        All `n` samples of a prompt come from one call of the policy; `max_tokens=0` samples nothing. A cancellation
        reaches every call. Raises `ContextOverflow` where a prompt leaves no room.
        """
        pairs = list(zip(prompts, requests, strict=True))
        if len(pairs) == 1:
            return [await self._answer(served, *pairs[0], score)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(served, prompt, request, score)) for prompt, request in pairs]
        return [task.result() for task in tasks]

    async def score(self, served: Served, tokens: IntArray) -> list[float]:
        """Return the log-probability of each token given those before it; the first is NaN."""
        if served.limit is not None and len(tokens) > served.limit:
            raise ContextOverflow(f"{len(tokens)} tokens are more than the context of {served.limit}; send fewer")
        found = await served.policy.logprobs(tokens)
        if len(found) != len(tokens):
            raise PolicyUnavailable(f"asked for {len(tokens)} log-probabilities, the policy returned {len(found)}")
        return [float(value) for value in found]

    async def _answer(self, served: Served, prompt: IntArray, request: SamplingRequest, score: bool) -> Answer:
        stops = request.stops(served.dialect)
        params = SamplingParams(
            max_tokens=_room(len(prompt), request.max_tokens, served.limit),
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            stop=stops.sampler,
            seed=request.seed,
        )
        scores = await self.score(served, prompt) if score else None
        if request.max_tokens == 0:
            nothing = Choice([], [], "", "length", Turn("", None))
            return Answer(prompt, [nothing] * request.n, served.ref, scores)
        samples = await served.policy.sample(prompt, params, request.n)
        if len(samples) != request.n:
            raise PolicyUnavailable(f"asked for {request.n} samples, the policy returned {len(samples)}")
        dialect, before = served.dialect, int(prompt[-1])
        ends = frozenset(() if request.ignore_eos else dialect.ends)
        choices: list[Choice] = []
        kept: list[tuple[Sample, int]] = []
        for raw in samples:
            sampled, logprobs = checked_sample(raw, dialect.vocabulary.size)
            sample = ended_sample(Sample(sampled, logprobs, raw.stop_reason, raw.ref), stops, ends)
            tokens = sample.tokens.tolist()
            turn = read_turn(dialect, stops, tokens, sample.stop_reason, before)
            kept.append((sample, turn.kept))
            text = _text(dialect, request, turn, tokens, before)
            choices.append(Choice(tokens, sample.logprobs.tolist(), text, sample.stop_reason, turn))
        if self._journal.on_disk:
            await asyncio.to_thread(self._remember, prompt, kept)
        else:
            self._remember(prompt, kept)
        return Answer(prompt, choices, samples[0].ref, scores)

    def _remember(self, prompt: IntArray, kept: Sequence[tuple[Sample, int]]) -> None:
        for sample, length in kept:
            self._journal.add(prompt, sample, length)


def _room(held: int, asked: int | None, limit: int | None) -> int:
    """Return how many tokens may be sampled: what is asked for, as far as the context has room."""
    if limit is None:
        if asked is None:
            raise Refused(
                "nothing bounds the answer, since the policy states no context length; send max_tokens",
                param="max_tokens",
            )
        return asked
    room = limit - held
    if room < (1 if asked != 0 else 0):
        raise ContextOverflow(
            f"This model's maximum context length is {limit} tokens. However, your prompt has {held} tokens, which "
            "leaves no room to sample; shorten it"
        )
    return room if asked is None else min(asked, room)


def _text(dialect: Dialect, request: SamplingRequest, turn: Turn, tokens: list[int], before: int) -> str:
    vocabulary = dialect.vocabulary
    if not (request.keep_stop or request.skip_specials):
        return turn.text
    if not request.skip_specials:
        return vocabulary.decode(tokens, before)
    if request.keep_stop or turn.kept == len(tokens) or turn.matched is None or isinstance(turn.matched, int):
        shown = tokens if request.keep_stop else tokens[: turn.kept]
        return vocabulary.decode([token for token in shown if token not in vocabulary.texts], before)
    return vocabulary.pattern.sub("", turn.text)


def body_numbers(values: Sequence[float]) -> list[Any]:
    """Return numbers as JSON has them: NaN is null."""
    return [None if value != value else value for value in values]
