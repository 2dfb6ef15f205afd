"""Reads prompts: text, token ids, lists of either, and chat messages with their tools."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tinker_atropos import ContextOverflow, Message
from tinker_atropos.trajectory import IntArray

from tinker_atropos_managed_server.answers import Refused
from tinker_atropos_managed_server.fields import Fields
from tinker_atropos_managed_server.session import Dialect
from tinker_atropos_managed_server.template_variables import RESERVED
from tinker_atropos_managed_server.tool_calls import for_template

MAX_PROMPTS = 1024
MAX_TOOLS = 512

# Longer texts are tokenised in a thread, so that other requests don't wait for them.
_LONG_TEXT = 20_000

RawPrompt = str | list[int]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be rendered, and what the template is told."""

    messages: list[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    read_calls: bool = True


def read_prompts(value: Any, name: str) -> tuple[list[RawPrompt], bool]:
    """Return the prompts, and whether there was a list of them; raises `Refused` for anything else."""
    right = "text, token ids, a list of texts or a list of lists of token ids"
    if isinstance(value, str):
        return [value], False
    if not isinstance(value, list) or not value:
        raise Refused(f"{name} is {value!r:.80}; send {right}", param=name)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value], False
    if len(value) > MAX_PROMPTS:
        raise Refused(f"{name} has {len(value)} prompts; send {MAX_PROMPTS} at most", param=name)
    if kinds == {str} or (kinds == {list} and all(set(map(type, ids)) == {int} for ids in value)):
        return value, True
    raise Refused(f"{name} is {value!r:.80}; send {right}", param=name)


async def encode_prompt(dialect: Dialect, prompt: RawPrompt, limit: int | None, *, specials: bool = True) -> IntArray:
    """Return the tokens of a prompt. Special-token text stands for the token.

    `specials`: the tokenizer's own beginning of sequence comes first, unless the text brings it. Raises
    `ContextOverflow` for a text that can't fit `limit` tokens however it is tokenised.
    """
    vocabulary = dialect.vocabulary
    if not isinstance(prompt, str):
        if min(prompt) < 0 or max(prompt) >= vocabulary.size:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary.size)
            raise Refused(
                f"{wrong} is no token id of this model; ids go from 0 to {vocabulary.size - 1}", param="prompt"
            )
        return np.array(prompt, dtype=np.int32)
    _refuse_endless(dialect, prompt, limit)
    tokens = await _maybe_in_thread(prompt, lambda: vocabulary.encode(prompt))
    leading = list(vocabulary.leading)
    if specials and tokens[: len(leading)] != leading:
        tokens = leading + tokens
    if not tokens:
        raise Refused("the prompt has no tokens, and a policy can't sample from nothing; send some", param="prompt")
    return np.array(tokens, dtype=np.int32)


async def encode_chat(dialect: Dialect, chat: Chat, limit: int | None) -> IntArray:
    """Return the tokens of a conversation as the chat template writes it."""
    template = dialect.template
    if chat.tools and "tools" not in template.tools_source:
        raise Refused(
            "this model's chat template knows no tools; leave them out, or set managed_server.chat_template to one "
            "that does",
            param="tools",
        )
    size = sum(len(message["content"]) for message in chat.messages if isinstance(message["content"], str))

    def render() -> list[int]:
        rendering = template.render(for_template(chat.messages), list(chat.tools) or None, **chat.variables)
        _refuse_endless(dialect, rendering.text, limit)
        return template.encode(rendering)

    tokens = await _maybe_in_thread(size, render)
    if not tokens:
        raise Refused("the chat template writes no tokens for these messages", param="messages")
    return np.array(tokens, dtype=np.int32)


def read_chat(fields: Fields) -> Chat:
    """Take messages, tools and what the template is told out of `fields`."""
    messages = fields.sequence("messages")
    if not messages:
        raise Refused("messages is missing or empty; send at least one message with role and content", param="messages")
    tools = _tools(fields)
    choice = fields.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise Refused(
            f"tool_choice={choice!r:.80} needs constrained decoding, which would change what is sampled; send 'auto' "
            "or 'none'",
            param="tool_choice",
            code="unsupported_parameter",
        )
    return Chat(
        [_message(message, place) for place, message in enumerate(messages)],
        tools,
        _variables(fields),
        read_calls=choice != "none",
    )


def _variables(fields: Fields) -> dict[str, Any]:
    variables = dict(fields.mapping("chat_template_kwargs"))
    taken = sorted(RESERVED & variables.keys())
    if taken:
        raise Refused(f"chat_template_kwargs.{taken[0]} can't be set there", param="chat_template_kwargs")
    reasoning = fields.mapping("reasoning")
    effort = fields.text("reasoning_effort") or reasoning.get("effort")
    if isinstance(effort, str):
        variables.setdefault("reasoning_effort", effort)
    if isinstance(reasoning.get("enabled"), bool):
        variables.setdefault("enable_thinking", reasoning["enabled"])
    if not fields.flag("add_generation_prompt", True):
        variables["add_generation_prompt"] = False
    if fields.flag("continue_final_message"):
        variables |= {"continue_final_message": True, "add_generation_prompt": False}
    return variables


def _tools(fields: Fields) -> Sequence[Mapping[str, Any]]:
    tools = fields.sequence("tools")
    if len(tools) > MAX_TOOLS:
        raise Refused(f"tools has {len(tools)} entries; send {MAX_TOOLS} at most", param="tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            raise Refused(
                f"tools[{place}] is {tool!r:.80}; send {{'type': 'function', 'function': {{'name': …}}}}", param="tools"
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise Refused(f"tools[{place}].function.name is {function.get('name')!r:.80}; send a name", param="tools")
    return tools


def _message(message: Any, place: int) -> Message:
    where = f"messages[{place}]"
    if not isinstance(message, dict):
        raise Refused(f"{where} is {message!r:.80}; send an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise Refused(f"{where}.role is {role!r:.80}; send 'system', 'user', 'assistant' or 'tool'", param=where)
    kept = {key: value for key, value in message.items() if value is not None}
    kept["role"] = "system" if role == "developer" else role
    kept["content"] = _content(message.get("content"), where)
    calls = kept.get("tool_calls")
    if calls is not None and not (isinstance(calls, list) and all(map(_is_call, calls))):
        raise Refused(
            f"{where}.tool_calls is {calls!r:.80}; send a list of "
            "{'id', 'type', 'function': {'name', 'arguments'}}",
            param=where,
        )
    if not calls:
        kept.pop("tool_calls", None)
    return kept


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments", ""), str | dict)
    )


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(f"{where}.content is {content!r:.80}; send text, a list of text parts, or null", param=where)
    texts: list[str] = []
    for place, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part if isinstance(part, str) else part.get("text") if kind in ("text", "input_text") else None
        if not isinstance(text, str):
            what = f"of type {kind!r}" if isinstance(kind, str) else f"{part!r:.80}"
            raise Refused(
                f"{where}.content[{place}] is {what}, and the policies served here read text alone; send text parts, "
                "{'type': 'text', 'text': …}",
                param=f"{where}.content",
                code="unsupported_content",
            )
        texts.append(text)
    return "\n".join(texts)


def _refuse_endless(dialect: Dialect, text: str, limit: int | None) -> None:
    longest = dialect.vocabulary.longest
    if limit is not None and len(text) > limit * longest:
        raise ContextOverflow(
            f"the prompt of {len(text)} characters can't fit the context of {limit} tokens; shorten it"
        )


async def _maybe_in_thread(text: str | int, work: Any) -> list[int]:
    size = text if isinstance(text, int) else len(text)
    found: list[int] = await asyncio.to_thread(work) if size > _LONG_TEXT else work()
    return found
