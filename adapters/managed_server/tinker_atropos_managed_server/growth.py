"""How an episode grows between two turns: as a chat that a template renders, or as raw text. Knows no sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tinker_atropos import Message, PluginError

from tinker_atropos_managed_server.template import ChatTemplate, Rendering
from tinker_atropos_managed_server.tool_calls import Reading, ToolFormat, for_template, read_tool_calls, tool_calls
from tinker_atropos_managed_server.turn import Turn
from tinker_atropos_managed_server.vocabulary import Vocabulary


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

    def reply(self, turn: Turn) -> Reading:
        """Take the turn that was sampled from the extension returned last; return it with its tool calls read."""
        ...


class ChatGrowth:
    """A conversation whose text the chat template writes.

    The template renders the whole conversation anew each turn. Where the new text begins with the text of the last
    prompt and of the turn sampled from it, only the rest is tokenised, after the exact tokens of the past. Where it
    does not (a stripped thought, trimmed whitespace, new tools), the conversation starts over. A turn with tool calls
    is given to the template as calls, or else, where that writes them differently, as the text that was sampled.
    """

    def __init__(self, template: ChatTemplate, tool_format: ToolFormat | None = None) -> None:
        self.messages: list[Message] = []
        self._template = template
        self._tool_format = tool_format
        self._spoken: dict[int, str] = {}  # by place in messages: the text of turns whose tool calls were read
        self._as_text = False  # whether those turns were last rendered as text
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
        renderings = self._renderings()
        for as_text, shown in renderings:
            past, turn = self._past, self._turn
            if past is not None and shown.text.startswith(past) and shown.text.startswith(turn.text, len(past)):
                tokens = self._template.continuation(shown, len(past) + len(turn.text), turn.end)
                if tokens is not None:
                    self._shown, self._as_text = shown, as_text
                    return Extension(tokens, fresh=False)
        self._as_text = False
        self._shown = next(shown for as_text, shown in renderings if not as_text)
        return Extension(self._template.encode(self._shown), fresh=True)

    def reply(self, turn: Turn) -> Reading:
        assert self._shown is not None
        self._past, self._turn = self._shown.text, turn
        offered = self._tools or ()
        reading = read_tool_calls(self._tool_format if offered else None, turn.text, offered)
        message: Message = {"role": "assistant", "content": reading.content}
        if reading.calls:
            self._spoken[len(self.messages)] = turn.text
            calls = tool_calls(reading.calls, f"call_{len(self.messages)}_")
            reading = Reading(reading.content, calls, reading.malformed)
            message["tool_calls"] = [dict(call) for call in calls]
        self.messages.append(message)
        return reading

    def _renderings(self) -> list[tuple[bool, Rendering]]:
        """Return the conversation with past tool calls as calls and, if there are any, as text; what fitted first."""
        render = self._template.render
        as_calls = (False, render(for_template(self.messages), self._tools))
        if not self._spoken:
            return [as_calls]
        messages = for_template(self.messages)
        for place, text in self._spoken.items():
            messages[place] = {"role": "assistant", "content": text}
        try:
            as_text = (True, render(messages, self._tools))
        except PluginError:  # a template may insist that a tool's answer follows a call
            return [as_calls]
        return [as_text, as_calls] if self._as_text else [as_calls, as_text]


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

    def reply(self, turn: Turn) -> Reading:
        self._unread, self._sampled = [], True
        self.messages.append({"role": "assistant", "content": turn.text})
        return Reading(turn.text)
