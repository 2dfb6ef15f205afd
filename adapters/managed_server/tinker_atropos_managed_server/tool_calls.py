"""Tool calls in sampled text, in the three forms that open models write, and back into what templates take. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from tinker_atropos import Message

ToolFormat: TypeAlias = Literal["hermes", "llama3_json", "qwen3_coder"]
"""`hermes`: JSON between `<tool_call>` tags (Hermes, Qwen). `llama3_json`: the turn is JSON, after `<|python_tag|>` or
without it. `qwen3_coder`: `<function=…><parameter=…>` tags."""

ToolParser: TypeAlias = Literal["auto", "hermes", "llama3_json", "qwen3_coder", "none"]

Call: TypeAlias = Mapping[str, Any]
"""`{"name": …, "arguments": {…}}` as read; OpenAI's form (`id`, `type`, `function`) once it has an id."""


class _Malformed(Exception):
    """A tool call was begun that can't be read."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A turn's text beside its tool calls. `malformed`: a call was begun that can't be read, so all stays text."""

    content: str
    calls: tuple[Call, ...] = ()
    malformed: bool = False


def tool_format_of(parser: ToolParser, template: str) -> ToolFormat | None:
    """Return the format that `managed_server.tool_parser` names; for `auto` the one that a chat template shows."""
    if parser == "none":
        return None
    if parser != "auto":
        return parser
    if "<function=" in template:
        return "qwen3_coder"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def read_tool_calls(tool_format: ToolFormat | None, text: str, tools: Sequence[Mapping[str, Any]]) -> Reading:
    """Return the calls in a sampled text, as `{"name", "arguments"}`; those inside a thought are none.

    A turn in which any call is malformed stays text as a whole: which calls were meant can't be known.
    """
    if tool_format is None:
        return Reading(text)
    thought, closing, said = text.rpartition("</think>")
    if not closing and "<think>" in text:
        return Reading(text)
    try:
        content, calls = _READERS[tool_format](said, tools)
    except (_Malformed, RecursionError):
        return Reading(text, malformed=True)
    if not calls:
        return Reading(text)
    return Reading((thought + closing + content).rstrip(), tuple(calls))


def tool_calls(calls: Sequence[Call], id_prefix: str) -> tuple[Call, ...]:
    """Return calls in OpenAI's form, with ids that count from `id_prefix`0 and arguments as JSON text."""
    return tuple(
        {
            "id": f"{id_prefix}{number}",
            "type": "function",
            "function": {
                "name": call["name"],
                "arguments": json.dumps(call["arguments"], ensure_ascii=False),
            },
        }
        for number, call in enumerate(calls)
    )


def for_template(messages: Sequence[Message]) -> list[Message]:
    """Return messages as chat templates take them: the arguments of their tool calls as objects, not as JSON text."""
    return [_with_objects(message) if message.get("tool_calls") else message for message in messages]


def _with_objects(message: Message) -> Message:
    calls = message["tool_calls"]
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call  # type: ignore[dict-item]


_Read: TypeAlias = tuple[str, list[Call]]


def _hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> _Read:
    pieces = text.split("<tool_call>")
    content, calls = [pieces[0]], list[Call]()
    for piece in pieces[1:]:
        body, closed, after = piece.partition("</tool_call>")
        found = _json(body)  # a missing closing tag at the very end is forgiven where the JSON is whole
        calls.append(_call(found, ("arguments",)))
        content.append(after)
        if not closed and piece is not pieces[-1]:
            raise _Malformed
    return _joined(content), calls


def _llama3(text: str, tools: Sequence[Mapping[str, Any]]) -> _Read:
    content, tagged, body = text.partition("<|python_tag|>")
    if not tagged:
        content, body = "", text
        if not body.lstrip().startswith("{"):
            return text, []
    calls: list[Call] = []
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    rest = body.strip()
    while rest:
        try:
            found, end = decoder.raw_decode(rest)
        except ValueError as error:
            if not tagged and not calls and not re.match(r'\{\s*"(name|type)"', rest):
                return text, []  # JSON-like text, which nobody said was a call
            raise _Malformed from error
        if not tagged and not calls and not (isinstance(found, dict) and {"parameters", "arguments"} & found.keys()):
            return text, []  # an answer that happens to be JSON
        calls.append(_call(found, ("parameters", "arguments")))
        rest = rest[end:].lstrip()
        if rest.startswith(";"):
            rest = rest[1:].lstrip()
        elif rest:
            raise _Malformed
    if tagged and not calls:
        raise _Malformed
    return content, calls


_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]*)>(.*?)</parameter>", re.DOTALL)


def _qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> _Read:
    calls: list[Call] = []
    content: list[str] = []
    place = 0
    for match in _FUNCTION.finditer(text):
        content.append(text[place : match.start()])
        calls.append(_function(match.group(1).strip(), match.group(2), tools))
        place = match.end()
    content.append(text[place:])
    left = _joined(piece.replace("<tool_call>", "").replace("</tool_call>", "") for piece in content)
    if "<function=" in left or (not calls and "<tool_call>" in text):
        raise _Malformed
    return (left, calls) if calls else (text, calls)


def _function(name: str, body: str, tools: Sequence[Mapping[str, Any]]) -> Call:
    types = _types(name, tools)
    arguments: dict[str, Any] = {}
    place = 0
    while match := _PARAMETER.match(body, place):
        key, value = match.group(1).strip(), match.group(2)
        # The template writes the value on lines of its own; only those two newlines are not the value's.
        value = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = _typed(value, types.get(key))
        place = match.end()
    if not name or body[place:].strip():
        raise _Malformed
    return {"name": name, "arguments": arguments}


def _types(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the JSON schema types of a tool's parameters, as far as it states them."""
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or function.get("name") != name:
            continue
        schema = function.get("parameters")
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        if isinstance(properties, Mapping):
            return {str(key): value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _typed(value: str, kind: Any) -> Any:
    """Return a parameter by its schema's type. Text stays text; what does not read as its type does too."""
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is None or kinds == ["string"]:
        return value
    try:
        found = json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        lowered = value.strip().lower()
        if "boolean" in kinds and lowered in ("true", "false"):
            return lowered == "true"
        return value
    return value if isinstance(found, str) or ("string" in kinds and found is not None) else found


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise _Malformed from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _call(found: Any, keys: tuple[str, ...]) -> Call:
    if not isinstance(found, dict):
        raise _Malformed
    name = found.get("name")
    arguments: Any = next((found[key] for key in keys if key in found), {})
    if isinstance(arguments, str):  # some models write the arguments as JSON text
        arguments = _json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise _Malformed
    return {"name": name, "arguments": arguments}


def _joined(pieces: Any) -> str:
    first, *rest = pieces
    return str(first) + "".join(piece for piece in rest if piece.strip())


_READERS: dict[ToolFormat, Callable[[str, Sequence[Mapping[str, Any]]], _Read]] = {
    "hermes": _hermes,
    "llama3_json": _llama3,
    "qwen3_coder": _qwen3_coder,
}
