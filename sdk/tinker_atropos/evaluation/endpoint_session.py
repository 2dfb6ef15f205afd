"""One episode over an OpenAI-compatible endpoint: the conversation in messages or text; tokens stay the server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tinker_atropos.adapter import Prompt, Transcript
from tinker_atropos.environment import Observation
from tinker_atropos.errors import ConfigError, PluginError
from tinker_atropos.evaluation.endpoint import Reply
from tinker_atropos.trajectory import Completion, FinishReason, FloatArray, IntArray, Message, PolicyRef, Sample, Stop

CHAT, TEXT = "/chat/completions", "/completions"


class UncountedCompletion(Completion):
    """A completion whose tokens nobody counted: an environment that asks how many there are is told so, never 0."""

    __slots__ = ()

    @property
    def tokens(self) -> int:
        """Raise `ConfigError`."""
        raise ConfigError(
            "the environment uses the length of answers in tokens, and the endpoint sends no usage.completion_tokens; "
            "turn its rewards for length off (such as env.length_weight=0), or ask an endpoint that counts"
        )

    @tokens.setter
    def tokens(self, value: int) -> None:
        pass

    def __repr__(self) -> str:
        return f"UncountedCompletion(text={self.text!r}, finish_reason={self.finish_reason!r})"


class EndpointSession:
    """A `TextSession` whose next question is `request()` and whose answer is given by `take` before `record`.

    The prompt that it returns has no tokens: the endpoint renders the conversation.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._messages: list[Message] = []
        self._text = ""
        self._raw: bool | None = None
        self._tools: list[Mapping[str, Any]] = []
        self._max_tokens: int | None = None
        self._reply: Reply | None = None
        self.finishes: list[str] = []

    def observe(self, observation: Observation, tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Append messages, or raw text; `PluginError` where one episode shows both."""
        if tools is not None:
            self._tools = [dict(tool) for tool in tools]
        if not observation:
            return
        raw = isinstance(observation, str)
        if self._raw is not None and raw is not self._raw:
            now, before = ("raw text", "messages") if raw else ("messages", "raw text")
            raise PluginError(f"the environment shows {now} after {before}; one episode must keep to one of them")
        self._raw = raw
        if isinstance(observation, str):
            self._text += observation
            self._messages.append({"role": "user", "content": observation})
        else:
            self._messages.extend(dict(message) for message in observation)

    def prompt(self, max_tokens: int | None) -> Prompt:
        """Return an empty prompt; what is asked is `request()`."""
        if self._raw is None:
            raise PluginError("the environment has shown nothing yet; its reset() must return messages or text")
        if self._raw and max_tokens is None:
            raise ConfigError(
                "max_tokens: nothing bounds a turn, and of a text completion endpoints sample 16 tokens then; say "
                "--max-tokens"
            )
        self._max_tokens = max_tokens
        return Prompt(np.zeros(0, np.int32), max_tokens or 0, self._stop)

    def request(self) -> tuple[str, dict[str, Any]]:
        """Return path and body of the next question, without model, seed and temperature."""
        body: dict[str, Any] = {"prompt": self._text} if self._raw else {"messages": list(self._messages)}
        if self._max_tokens is not None:
            body["max_tokens"] = self._max_tokens
        if self._tools and not self._raw:
            body["tools"] = [_tool(tool) for tool in self._tools]
        return (TEXT if self._raw else CHAT), {**body, **stop_fields(self._stop)}

    def take(self, reply: Reply, ref: PolicyRef) -> Sample:
        """Keep an answer for `record`; return the sample that stands for it, without tokens."""
        self._reply = reply
        tokens: IntArray = np.zeros(0, np.int32)
        logprobs: FloatArray = np.zeros(0, np.float32)
        return Sample(tokens, logprobs, _finish(reply), ref)

    def record(self, sample: Sample) -> Completion:
        """Append the answer to the conversation and return it."""
        reply, self._reply = self._reply, None
        assert reply is not None, "take() comes first"
        self._text += reply.text + (reply.matched or "")
        message: Message = {"role": "assistant", "content": reply.text}
        if reply.tool_calls:
            message["tool_calls"] = [dict(call) for call in reply.tool_calls]
        self._messages.append(message)
        self.finishes.append(reply.finish)
        if reply.sampled_tokens is None:
            return UncountedCompletion(reply.text, sample.stop_reason, reply.tool_calls)
        return Completion(reply.text, sample.stop_reason, reply.tool_calls, reply.sampled_tokens)

    def transcript(self) -> Transcript:
        """Return the conversation; it has no segments, since no token of it is known."""
        return Transcript((), tuple(self._messages))


class OneSession:
    """A `SessionFactory` of one session."""

    def __init__(self, session: EndpointSession) -> None:
        self._session = session

    def open(self, tokenizer: Any, *, stop: Stop = None, context_length: int | None = None) -> EndpointSession:
        """Return it."""
        return self._session


def stop_fields(stop: Stop) -> dict[str, Any]:
    """Return a stop in the dialect's fields; raises `ConfigError` for `[]`, which it has no form for.

    Text goes as `stop`, ids as `stop_token_ids`, which vLLM, SGLang and our own endpoints read. Endpoints end at the
    model's own end of turn besides.
    """
    if stop is None:
        return {}
    items = [stop] if isinstance(stop, str | int) else list(stop)
    if not items:
        raise ConfigError(
            "stop: the environment turns every stop off ([]), which OpenAI-compatible endpoints have no form for; "
            "evaluate it on a run's checkpoint or a model on this machine"
        )
    texts = [item for item in items if isinstance(item, str)]
    ids = [item for item in items if not isinstance(item, str)]
    return {**({"stop": texts} if texts else {}), **({"stop_token_ids": ids} if ids else {})}


def _finish(reply: Reply) -> FinishReason:
    """Only `length` is a cut; `tool_calls`, `content_filter` and the like end a turn, and are kept in the record."""
    return "length" if reply.finish in ("length", "max_tokens") else "stop"


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in OpenAI's shape, whether it is given so or as the bare function."""
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
