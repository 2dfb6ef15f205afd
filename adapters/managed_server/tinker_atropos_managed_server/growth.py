"""How an episode grows between two turns: as a chat that a template renders, or as raw text. Knows no sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos import Message, PluginError

from tinker_atropos_managed_server.template import ChatTemplate, Rendering
from tinker_atropos_managed_server.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Turn:
    """A sampled turn: its text without the stop, and the end-of-turn id that its tokens end with, if they do."""

    text: str
    end: int | None


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens to sample from next: after all tokens so far, or, if `fresh`, in a segment of their own."""

    tokens: list[int]
    fresh: bool


class Growth(Protocol):
    """What chat and raw text have in common."""

    messages: list[Message]

    def observe(self, observation: Any, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Take what the environment shows."""
        ...

    def extension(self) -> Extension:
        """Return the tokens of the next prompt; changes nothing."""
        ...

    def reply(self, turn: Turn) -> None:
        """Take the turn that was sampled from the extension returned last."""
        ...


class ChatGrowth:
    """A conversation whose text the chat template writes.

    The template renders the whole conversation anew each turn. Where the new text begins with the text of the last
    prompt and of the turn sampled from it, only the rest is tokenised, after the exact tokens of the past. Where it
    does not (a stripped thought, a re-rendered tool call, trimmed whitespace, new tools), the conversation starts over.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.messages: list[Message] = []
        self._template = template
        self._tools: Sequence[Mapping[str, Any]] | None = None
        self._shown: Rendering | None = None  # what the next turn is sampled from
        self._past: str | None = None  # what the last turn was sampled from
        self._turn = Turn("", None)

    def observe(self, observation: Any, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Append messages; `tools` None keeps those of before."""
        for place, message in enumerate(observation):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise PluginError(
                    f"observed message {place} is {message!r}; expected a mapping with `role` and `content`, such as "
                    '{"role": "user", "content": "…"}'
                )
        self.messages += [dict(message) for message in observation]  # an environment may go on to change its own
        if tools is not None:
            self._tools = list(tools)

    def extension(self) -> Extension:
        if not self.messages:
            raise PluginError("the environment has shown no message yet; its reset() must return at least one")
        self._shown = shown = self._template.render(self.messages, self._tools)
        past, turn = self._past, self._turn
        if past is not None and shown.text.startswith(past) and shown.text.startswith(turn.text, len(past)):
            tokens = self._template.continuation(shown, len(past) + len(turn.text), turn.end)
            if tokens is not None:
                return Extension(tokens, fresh=False)
        return Extension(self._template.encode(shown), fresh=True)

    def reply(self, turn: Turn) -> None:
        assert self._shown is not None
        self._past, self._turn = self._shown.text, turn
        self.messages.append({"role": "assistant", "content": turn.text})


class RawGrowth:
    """Text that no chat template touches, tokenised piece by piece as it arrives.

    Special-token text in it stands for the token. The first piece gets the special tokens that the tokenizer itself
    puts before a text (once: not if it brings them), later ones get none. In `messages` the environment's text has the
    role `user`.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.messages: list[Message] = []
        self._vocabulary = vocabulary
        self._unread: list[int] = []
        self._begun = False
        self._sampled = False

    def observe(self, observation: Any, tools: Sequence[Mapping[str, Any]] | None) -> None:
        """Append text; tools need a chat template and are refused."""
        if tools:
            raise PluginError("tools can't be offered with raw text; show the task as messages")
        if not observation:
            return
        tokens = self._vocabulary.encode(observation)
        leading = list(self._vocabulary.leading)
        if not self._begun and tokens[: len(leading)] != leading:
            tokens = leading + tokens
        self._begun = True
        self._unread += tokens
        self.messages.append({"role": "user", "content": observation})

    def extension(self) -> Extension:
        if not self._begun:
            raise PluginError("the environment has shown no text yet; its reset() must return some")
        return Extension(self._unread, fresh=not self._sampled)

    def reply(self, turn: Turn) -> None:
        self._unread, self._sampled = [], True
        self.messages.append({"role": "assistant", "content": turn.text})
