"""Renders conversations with a chat template and tokenises the text, whole or from some place on."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tinker_atropos import Message, PluginError

from tinker_atropos_managed_server.vocabulary import Vocabulary

Tools = Sequence[Mapping[str, Any]]

_PROBE = "an answer to be found again"


@dataclass(frozen=True, slots=True)
class Rendering:
    """A conversation as the template writes it. `literal` are the places `(start, end)` of special-token text in it
    that came from messages or tools rather than from the template, in order.
    """

    text: str
    literal: tuple[tuple[int, int], ...] = ()

    def is_literal(self, place: int) -> bool:
        """Whether the character at `place` belongs to such text."""
        found = bisect_right(self.literal, (place, len(self.text))) - 1
        return found >= 0 and place < self.literal[found][1]


class ChatTemplate:
    """A tokenizer's chat template, or `source` in its place, with the variables that it is given.

    **Forged turn markers.** A user message may hold `<|im_end|>`, and in the rendered text nothing tells it from the
    template's own. Such text is therefore tokenised as the ordinary characters it is, wherever it comes from a message
    or a tool description; only the template writes special tokens. All else is tokenised just as `transformers` does.
    The one exception: markers in an assistant's message that the template itself looks for (a thought's `[/THINK]`).
    """

    def __init__(self, vocabulary: Vocabulary, source: str | None, variables: Mapping[str, Any]) -> None:
        self._vocabulary = vocabulary
        self._source = source
        self._variables = dict(variables)

    @cached_property
    def ends(self) -> tuple[str, ...]:
        """The special tokens that the template writes right after an assistant's text; empty if it writes none.

        Some templates end the last turn differently from those before it, so both are looked at.
        """
        user, reply = {"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}
        found: list[str] = []
        for messages in ([user, reply], [user, reply, user]):
            try:
                text = self._apply(messages, None, add_generation_prompt=False)
            except PluginError:  # said again, with its reason, when a real conversation is rendered
                break
            _, seen, tail = text.rpartition(_PROBE)
            match = self._vocabulary.pattern.match(tail.lstrip()) if seen else None
            if match is None:  # what only appears before the next message begins that message
                break
            found.append(match.group())
        return tuple(dict.fromkeys(found))

    @cached_property
    def tools_source(self) -> str:
        """The Jinja source that conversations with tools are rendered with; empty if there is none."""
        if self._source is not None:
            return self._source
        found = getattr(self._vocabulary.tokenizer, "chat_template", None) or ""
        if isinstance(found, Mapping):
            found = found.get("tool_use") or found.get("default") or ""
        return str(found)

    def render(self, messages: Sequence[Message], tools: Tools | None, **variables: Any) -> Rendering:
        """Return the conversation up to where the assistant's next turn begins; `PluginError` if it does not fit.

        `variables` go to the template, before those of the configuration; `add_generation_prompt=False` leaves the
        beginning of the next turn out, `continue_final_message=True` leaves the last message open.
        """
        plain = self._apply(messages, tools, **variables)
        if not any(self._vocabulary.pattern.search(text) for text in _strings([messages, tools])):
            return Rendering(plain)
        found = self._marked(plain, messages, tools, None, variables)
        # A template that reads a marker in an assistant's text (to split off the thought) must see it.
        return found if found.text == plain else self._marked(plain, messages, tools, "assistant", variables)

    def encode(self, rendering: Rendering, start: int = 0, anchor: str | None = None) -> list[int]:
        """Return the tokens from character `start` on; `anchor` is the special token just before it, if any."""
        text, vocabulary = rendering.text, self._vocabulary
        if not rendering.literal or rendering.literal[-1][1] <= start:
            return vocabulary.encode_after(anchor, text[start:])
        # Cut at the template's own special tokens, where no token crosses; literal text lies whole between two cuts.
        cuts: list[tuple[int, int, str | None]] = [(start, start, anchor)]
        place = start
        while match := vocabulary.pattern.search(text, place):
            if rendering.is_literal(match.start()):
                place = match.start() + 1
            else:
                place = match.end()
                cuts.append((match.start(), match.end(), match.group()))
        cuts.append((len(text), len(text), None))
        tokens: list[int] = []
        plain_from = start  # what lies between here and the next literal stretch is tokenised in one go
        for (_, begin, before), (end, _, after) in pairwise(cuts):
            if any(begin <= low < end for low, _ in rendering.literal):
                tokens += vocabulary.encode_after(anchor if plain_from == start else None, text[plain_from:begin])
                tokens += vocabulary.encode_literal(text[begin:end], before, after)
                plain_from = end
        return tokens + vocabulary.encode_after(anchor if plain_from == start else None, text[plain_from:])

    def continuation(self, rendering: Rendering, start: int, end: int | None) -> list[int] | None:
        """Return the tokens that follow a sampled turn whose text ends at character `start`.

        `end` is the end-of-turn id that was sampled, None if the turn lacks it; then it comes from the template here,
        so that each turn has exactly one. None: the template does not close the turn at this place, so the prefix is
        not kept. No token crosses `start`: special tokens are tokenised apart, and where a template has none the
        sampled tokens stay as they are and only what follows is tokenised.
        """
        text = rendering.text
        for closing in self.ends:
            if text.startswith(closing, start) and not rendering.is_literal(start):
                if end is None:
                    return self.encode(rendering, start)
                return self.encode(rendering, start + len(closing), closing)
        if self.ends:
            return None
        sampled = None if end is None else self._vocabulary.texts[end]
        # Where the next role's marker ends a turn (`<|user|>`), the model has sampled what the template writes next.
        if sampled is not None and text.startswith(sampled, start) and not rendering.is_literal(start):
            return self.encode(rendering, start + len(sampled), sampled)
        return self.encode(rendering, start, sampled)

    def _apply(self, messages: Sequence[Message], tools: Tools | None, **variables: Any) -> str:
        tokenizer = self._vocabulary.tokenizer
        if self._source is None and not getattr(tokenizer, "chat_template", None):
            raise PluginError(
                f"the tokenizer {getattr(tokenizer, 'name_or_path', '') or type(tokenizer).__name__!r} has no chat "
                "template; set managed_server.chat_template to a Jinja file, or env.prompt_format=completion"
            )
        try:
            return str(
                tokenizer.apply_chat_template(
                    list(messages),
                    tools=[dict(tool) for tool in tools] if tools else None,
                    chat_template=self._source,
                    tokenize=False,
                    **{"add_generation_prompt": True, **self._variables, **variables},
                )
            )
        except ImportError:
            raise
        except Exception as error:  # a template is a program, it may raise anything
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise PluginError(
                f"the chat template refuses this conversation (roles: {roles}): {type(error).__name__}: {error}; "
                "change the environment's messages, or give another managed_server.chat_template"
            ) from error

    def _marked(
        self,
        plain: str,
        messages: Sequence[Message],
        tools: Tools | None,
        skip_role: str | None,
        variables: Mapping[str, Any],
    ) -> Rendering:
        """Render with words in the place of special-token text, put the text back, and note where it stands."""
        word = "literalmarker"
        while word in plain:
            word += "x"
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return f"{word}{len(hidden) - 1}e"

        def swap(value: Any) -> Any:
            if isinstance(value, str):
                return self._vocabulary.pattern.sub(hide, value)
            if isinstance(value, Mapping):
                return {key: swap(item) for key, item in value.items()}
            return [swap(item) for item in value] if isinstance(value, list | tuple) else value

        swapped = [message if message["role"] == skip_role else swap(message) for message in messages]
        rendered = self._apply(swapped, swap(tools) if tools else None, **variables)
        pieces: list[str] = []
        literal: list[tuple[int, int]] = []
        length = 0
        for number, piece in enumerate(re.split(f"{word}([0-9]+)e", rendered)):
            piece = hidden[int(piece)] if number % 2 else piece
            if number % 2:
                literal.append((length, length + len(piece)))
            pieces.append(piece)
            length += len(piece)
        return Rendering("".join(pieces), tuple(literal))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)
