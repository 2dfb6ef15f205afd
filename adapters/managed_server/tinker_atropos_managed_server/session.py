"""One episode in exact tokens: prompts that extend what was sampled, and sampled tokens kept as they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from tinker_atropos import (
    Completion,
    ConfigError,
    ContextOverflow,
    PluginError,
    Prompt,
    RunError,
    Sample,
    Segment,
    Stop,
    Transcript,
)
from tinker_atropos.environment import Observation
from tinker_atropos.trajectory import BoolArray, FloatArray, IntArray

from tinker_atropos_managed_server.growth import ChatGrowth, Growth, RawGrowth
from tinker_atropos_managed_server.stops import parse_stop
from tinker_atropos_managed_server.template import ChatTemplate
from tinker_atropos_managed_server.tool_calls import ToolFormat, tool_format_of
from tinker_atropos_managed_server.turn import checked_sample, read_turn, trainable
from tinker_atropos_managed_server.vocabulary import Vocabulary

if TYPE_CHECKING:
    from tinker_atropos_managed_server import ManagedServerConfig


@dataclass(frozen=True, slots=True)
class Dialect:
    """A tokenizer and its template, with every id that ends a turn in them, and how its model writes tool calls."""

    vocabulary: Vocabulary
    template: ChatTemplate
    ends: tuple[int, ...]
    tool_format: ToolFormat | None = None


@dataclass(slots=True)
class _OpenSegment:
    """A segment that still grows: the past as the sampler last saw it, and what it sampled then."""

    tokens: list[IntArray] = field(default_factory=list)
    logprobs: list[FloatArray] = field(default_factory=list)
    mask: list[BoolArray] = field(default_factory=list)
    length: int = 0

    def append(self, tokens: IntArray, logprobs: FloatArray, mask: BoolArray) -> None:
        self.tokens.append(tokens)
        self.logprobs.append(logprobs)
        self.mask.append(mask)
        self.length += len(tokens)

    def close(self) -> Segment:
        return Segment(np.concatenate(self.tokens), np.concatenate(self.logprobs), np.concatenate(self.mask))


@dataclass(frozen=True, slots=True)
class _Pending:
    """The prompt that the next sample belongs to. `given` of its tokens are new to the segment."""

    tokens: IntArray
    given: int
    fresh: bool


class ManagedSession:
    """A `TextSession`: see `tinker_atropos.TextSession` for the contract.

    Prompt tokens, and an end of turn that the sampler left out, carry a False mask; a sampled token carries True unless
    its log-probability is missing (`no_logprob`) or none at all (`impossible_logprob`: infinite, or above 0). What was
    observed but never sampled from is in the messages, not in the segments.
    """

    def __init__(self, dialect: Dialect, stop: Stop, context_length: int | None) -> None:
        self._dialect = dialect
        self._stops = parse_stop(stop, dialect.vocabulary, dialect.ends)
        self._context_length = context_length
        self._growth: Growth | None = None
        self._segments: list[_OpenSegment] = []
        self._pending: _Pending | None = None
        self._masked: Counter[str] = Counter()
        self.unproven_stops = 0
        """How many turns were said to have stopped though neither their last token nor their text holds a stop."""
        self.malformed_tool_calls = 0
        """How many turns began a tool call that can't be read; they stay text."""

    def observe(self, observation: Observation, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Append messages, or raw text; `PluginError` where one episode shows both. An empty observation is none."""
        self._pending = None
        raw = isinstance(observation, str)
        if self._growth is None:
            if not observation and not tools:
                return
            dialect = self._dialect
            self._growth = RawGrowth(dialect.vocabulary) if raw else ChatGrowth(dialect.template, dialect.tool_format)
        elif observation and raw is not isinstance(self._growth, RawGrowth):
            now, before = ("raw text", "messages") if raw else ("messages", "raw text")
            raise PluginError(f"the environment shows {now} after {before}; one episode must keep to one of them")
        self._growth.observe(observation or (), tools)

    def prompt(self, max_tokens: int | None) -> Prompt:
        """Return the exact prompt of the next turn; asked again, the same.

        The tokens are read-only. Raises `ContextOverflow` where there is no room to sample and `ConfigError` where
        nothing bounds the turn.
        """
        pending = self._pending = self._pending or self._next()
        held, most = len(pending.tokens), self._context_length
        if most is None and max_tokens is None:
            raise ConfigError(
                "max_tokens: nothing bounds the turn, since the policy states no context length; "
                "set env.max_token_length"
            )
        room = max_tokens if max_tokens is not None else most
        assert room is not None
        if most is not None:
            room = min(room, most - held)
        if room < 1:
            limit = "no stated length" if most is None else f"{most} tokens"
            asked = "all the room there is" if max_tokens is None else f"{max_tokens} new tokens"
            raise ContextOverflow(
                f"no room to sample: the prompt has {held} tokens, the context {limit}, and {asked} were asked for; "
                "shorten the conversation or raise the limit"
            )
        return Prompt(pending.tokens, room, self._stops.sampler)

    def record(self, sample: Sample) -> Completion:
        """Keep the sampled tokens as they are; return their text without the stop (see `read_turn`).

        Where tools are offered, the tool calls in it are read, and its text is what stands beside them. Raises
        `PolicyUnavailable` for a sample that is broken (lengths that differ, ids outside the vocabulary); nothing of it
        is kept.
        """
        pending = self._pending
        if pending is None or self._growth is None:
            raise RunError("a sample came without a prompt: call prompt() before each record()")
        tokens, logprobs = checked_sample(sample, self._dialect.vocabulary.size)
        turn = read_turn(self._dialect, self._stops, tokens.tolist(), sample.stop_reason, int(pending.tokens[-1]))
        self.unproven_stops += not turn.proven
        reading = self._growth.reply(turn)
        self.malformed_tool_calls += reading.malformed
        self._pending = None
        if pending.fresh:
            self._segments.append(_OpenSegment())
        given = pending.tokens[len(pending.tokens) - pending.given :]
        self._segments[-1].append(given, np.zeros(len(given), dtype=np.float32), np.zeros(len(given), dtype=np.bool_))
        self._keep_sampled(tokens, logprobs)
        return Completion(reading.content, sample.stop_reason, tool_calls=reading.calls, tokens=len(tokens))

    def transcript(self) -> Transcript:
        """Return the episode so far; every segment ends with what was sampled last in it."""
        messages = tuple(self._growth.messages) if self._growth is not None else ()
        return Transcript(tuple(segment.close() for segment in self._segments), messages, dict(self._masked))

    def _next(self) -> _Pending:
        if self._growth is None:
            raise PluginError("the environment has shown nothing yet; its reset() must return messages or text")
        extension = self._growth.extension()
        new = np.asarray(extension.tokens, dtype=np.int32)
        tokens = new if extension.fresh else np.concatenate([*self._segments[-1].tokens, new])
        if not len(tokens):
            raise PluginError("the first observation has no tokens, and a policy can't sample from nothing")
        tokens.setflags(write=False)
        return _Pending(tokens, len(new), extension.fresh)

    def _keep_sampled(self, tokens: IntArray, logprobs: FloatArray) -> None:
        mask, missing, impossible = trainable(logprobs)
        for reason, count in (("no_logprob", missing), ("impossible_logprob", impossible)):
            if count:
                self._masked[reason] += count
        self._segments[-1].append(tokens, np.where(mask, logprobs, np.float32(0)), mask)


class ManagedSessions:
    """Opens one session per episode; what a tokenizer's sessions have in common is found once and kept."""

    def __init__(self, config: ManagedServerConfig) -> None:
        self._source: str | None = None
        if config.chat_template is not None:
            path = config.chat_template.expanduser()
            try:
                self._source = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"managed_server.chat_template: {str(path)!r} can't be read ({error}); give a Jinja file's path"
                ) from error
        self._variables = dict(config.chat_template_kwargs)
        if config.enable_thinking is not None:
            self._variables["enable_thinking"] = config.enable_thinking
        self._end_of_turn = config.end_of_turn
        self._tool_parser = config.tool_parser
        self.dialect = lru_cache(maxsize=8)(self._make_dialect)  # policies of each version may bring a tokenizer

    def open(self, tokenizer: Any, *, stop: Stop = None, context_length: int | None = None) -> ManagedSession:
        """Return a new session; raises `ConfigError` for a stop or a context length that can't be one."""
        if context_length is not None and context_length < 1:
            raise ConfigError(f"context_length: {context_length} holds no token; expected at least 1, or null")
        return ManagedSession(self.dialect(tokenizer), stop, context_length)

    def client_template(self, tokenizer: Any) -> str | None:
        """Return the chat template that a client needs to render as these sessions do; None: the tokenizer's own.

        The configured variables are set at its top, since a client does not pass them.
        """
        if self._source is None and not self._variables:
            return None
        source = self.dialect(tokenizer).template.tools_source
        if not source:
            return None
        return "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in self._variables.items()) + source

    def _make_dialect(self, tokenizer: Any) -> Dialect:
        vocabulary = Vocabulary(tokenizer, self._end_of_turn)
        template = ChatTemplate(vocabulary, self._source, self._variables)
        closing = [vocabulary.specials[text] for text in template.ends]
        ends = tuple(dict.fromkeys([*vocabulary.ends, *closing]))
        return Dialect(vocabulary, template, ends, tool_format_of(self._tool_parser, template.tools_source))


def _literal(value: Any) -> str:
    """Return a value as Jinja writes it, which but for these three words is JSON."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_literal(str(key))}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return repr(value)
