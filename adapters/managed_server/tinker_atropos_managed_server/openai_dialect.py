"""OpenAI's dialect: chat and text completions, as one JSON body or as server-sent chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos_managed_server.answers import Refused
from tinker_atropos_managed_server.fields import Fields
from tinker_atropos_managed_server.inference import Answer, Choice, body_numbers
from tinker_atropos_managed_server.prompts import Chat, RawPrompt, read_chat, read_prompts
from tinker_atropos_managed_server.sampling_request import SamplingRequest, read_sampling, refuse_too_many
from tinker_atropos_managed_server.session import Dialect
from tinker_atropos_managed_server.tool_calls import Reading, read_tool_calls, tool_calls

# What OpenAI and vLLM take where a text completion does not say.
_COMPLETION_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """How a client wants its answer."""

    logprobs: bool = False
    echo: bool = False
    stream: bool = False
    usage: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for `/v1/chat/completions`."""

    model: str | None
    chat: Chat
    sampling: SamplingRequest
    shape: Shape


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request for `/v1/completions`. `specials`: the tokenizer's beginning of sequence comes before a text."""

    model: str | None
    prompts: list[RawPrompt]
    sampling: SamplingRequest
    shape: Shape
    specials: bool = True
    score: bool = field(default=False)


def is_health_check(body: Any) -> bool:
    """Whether this is the request that Atropos' clients send once a second to see whether a server is there.

    They ask for one token after "hi" and nothing else, and read none of the answer.
    """
    if not isinstance(body, dict) or body.get("max_tokens") != 1 or not body.keys() <= _HEALTH_KEYS:
        return False
    return body.get("prompt") == "hi" or body.get("messages") == [{"role": "user", "content": "hi"}]


_HEALTH_KEYS = frozenset({"model", "prompt", "messages", "max_tokens"})


def read_chat_request(body: Any) -> ChatRequest:
    """Read the body of a chat completion; raises `Refused` for what can't be done."""
    fields = Fields(body)
    model = fields.text("model")
    chat = read_chat(fields)
    sampling = read_sampling(fields, default_max_tokens=None)
    wants = fields.flag("logprobs")
    if _top(fields, "top_logprobs") is not None and not wants:
        raise Refused("top_logprobs needs logprobs=true", param="top_logprobs")
    shape = _shape(fields, wants)
    fields.finish()
    return ChatRequest(model, chat, sampling, shape)


def read_completion_request(body: Any) -> CompletionRequest:
    """Read the body of a text completion; raises `Refused` for what can't be done."""
    fields = Fields(body)
    model = fields.text("model")
    prompts, _ = read_prompts(fields.take("prompt"), "prompt")
    echo = fields.flag("echo")
    sampling = read_sampling(fields, default_max_tokens=_COMPLETION_TOKENS, least_max_tokens=0 if echo else 1)
    wants = _top(fields, "logprobs") is not None
    shape = _shape(fields, wants, echo)
    specials = fields.flag("add_special_tokens", True)
    fields.finish()
    refuse_too_many([sampling] * len(prompts))
    return CompletionRequest(model, prompts, sampling, shape, specials, score=echo and wants)


def _top(fields: Fields, name: str) -> int | None:
    value = fields.take(name)
    if value is False:
        return None
    if value is not None and (value is not True and (type(value) is not int or value < 0)):
        raise fields.wrong(name, value, "0 or 1")
    if value is not None and value > 1:
        raise Refused(
            f"{name}={value} asks for more than the sampled token's log-probability, which is all that a policy tells; "
            "send 0 or 1",
            param=name,
            code="unsupported_parameter",
        )
    return None if value is None else int(value)


def _shape(fields: Fields, logprobs: bool, echo: bool = False) -> Shape:
    options = fields.mapping("stream_options")
    return Shape(
        logprobs=logprobs,
        echo=echo,
        stream=fields.flag("stream"),
        usage=options.get("include_usage") is True,
        token_ids=fields.flag("return_token_ids"),
        tokens_as_ids=fields.flag("return_tokens_as_token_ids"),
    )


def chat_body(model: str, dialect: Dialect, request: ChatRequest, answer: Answer) -> tuple[dict[str, Any], int]:
    """Return the body of a chat completion, and how many of its choices have a malformed tool call."""
    choices = []
    malformed = 0
    for index, choice in enumerate(answer.choices):
        reading = Reading(choice.text)
        if request.chat.tools and request.chat.read_calls:
            reading = read_tool_calls(dialect.tool_format, choice.text, request.chat.tools)
            malformed += reading.malformed
        message: dict[str, Any] = {"role": "assistant", "content": reading.content}
        finish: str = choice.finish_reason
        if reading.calls:
            message["content"] = reading.content or None
            message["tool_calls"] = list(tool_calls(reading.calls, f"call_{uuid.uuid4().hex[:20]}_"))
            finish = "tool_calls" if finish == "stop" else finish
        made = {
            "index": index,
            "message": message,
            "logprobs": _chat_logprobs(dialect, request.shape, choice) if request.shape.logprobs else None,
            "finish_reason": finish,
            "stop_reason": choice.turn.matched,
        }
        if request.shape.token_ids:
            made["token_ids"] = choice.tokens
        choices.append(made)
    body = _body("chatcmpl", "chat.completion", model, choices, [answer])
    if request.shape.token_ids:
        body["prompt_token_ids"] = answer.prompt.tolist()
    return body, malformed


def completion_body(
    model: str, dialect: Dialect, request: CompletionRequest, answers: Sequence[Answer]
) -> dict[str, Any]:
    """Return the body of a text completion: the choices of the first prompt, then those of the second, and so on."""
    choices: list[dict[str, Any]] = []
    shape = request.shape
    for raw, answer in zip(request.prompts, answers, strict=True):
        prompt = answer.prompt.tolist()
        echoed = (raw if isinstance(raw, str) else dialect.vocabulary.decode(raw)) if shape.echo else ""
        for choice in answer.choices:
            made: dict[str, Any] = {
                "index": len(choices),
                "text": echoed + choice.text,
                "logprobs": _completion_logprobs(dialect, shape, answer, choice) if shape.logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.turn.matched,
            }
            if shape.token_ids:
                made |= {"token_ids": choice.tokens, "prompt_token_ids": prompt}
            choices.append(made)
    return _body("cmpl", "text_completion", model, choices, answers)


def health_body(model: str, chat: bool, step: int) -> dict[str, Any]:
    """Return the answer to a health check: no token, and no sampling."""
    content: dict[str, Any] = {"message": {"role": "assistant", "content": ""}} if chat else {"text": ""}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
    prefix, kind = ("chatcmpl", "chat.completion") if chat else ("cmpl", "text_completion")
    return {
        "id": f"{prefix}-health",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        "policy_step": step,
    }


def chunks(body: Mapping[str, Any], usage: bool) -> Iterator[dict[str, Any]]:
    """Return a finished body as the chunks of a stream; with `usage` the last one counts the tokens."""
    chat = body["object"] == "chat.completion"
    head = {key: body[key] for key in ("id", "created", "model", "policy_step")}
    head["object"] = "chat.completion.chunk" if chat else "text_completion"
    if "prompt_token_ids" in body:
        head["prompt_token_ids"] = body["prompt_token_ids"]
    for choice in body["choices"]:
        rest = {key: value for key, value in choice.items() if key not in ("message", "text")}
        open_ended = {**rest, "finish_reason": None, "stop_reason": None}
        if not chat:
            yield {**head, "choices": [{**rest, "text": choice["text"]}]}
            continue
        message = choice["message"]
        delta = {"role": "assistant", "content": message["content"] or ""}
        yield {**head, "choices": [{**open_ended, "delta": delta}]}
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
        if calls:
            yield {**head, "choices": [{"index": rest["index"], "delta": {"tool_calls": calls}, "finish_reason": None}]}
        ended = {key: rest[key] for key in ("index", "finish_reason", "stop_reason")}
        yield {**head, "choices": [{**ended, "delta": {}}]}
    if usage:
        yield {**head, "choices": [], "usage": body["usage"]}


def _body(prefix: str, kind: str, model: str, choices: list[Any], answers: Sequence[Answer]) -> dict[str, Any]:
    prompt = sum(len(answer.prompt) for answer in answers)
    sampled = sum(len(choice.tokens) for answer in answers for choice in answer.choices)
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        "policy_step": answers[0].ref.step,
    }


def _name(dialect: Dialect, shape: Shape, token: int) -> str:
    return f"token_id:{token}" if shape.tokens_as_ids else dialect.vocabulary.token_text(token)


def _chat_logprobs(dialect: Dialect, shape: Shape, choice: Choice) -> dict[str, Any]:
    content = []
    for token, logprob in zip(choice.tokens, body_numbers(choice.logprobs), strict=True):
        text = dialect.vocabulary.token_text(token)
        entry = {
            "token": _name(dialect, shape, token),
            "logprob": logprob,
            # Half a character has bytes of its own, which its text does not tell.
            "bytes": None if "\ufffd" in text else list(text.encode("utf-8", "replace")),
        }
        content.append({**entry, "top_logprobs": [entry]})
    return {"content": content, "refusal": None}


def _completion_logprobs(dialect: Dialect, shape: Shape, answer: Answer, choice: Choice) -> dict[str, Any]:
    tokens, logprobs = choice.tokens, body_numbers(choice.logprobs)
    if answer.prompt_logprobs is not None:
        tokens = [*answer.prompt.tolist(), *tokens]
        logprobs = [*body_numbers(answer.prompt_logprobs), *logprobs]
    names = [_name(dialect, shape, token) for token in tokens]
    offsets = []
    place = 0
    for token in tokens:
        offsets.append(place)
        place += len(dialect.vocabulary.token_text(token))
    return {
        "tokens": names,
        "token_logprobs": logprobs,
        "top_logprobs": [
            None if logprob is None else {name: logprob} for name, logprob in zip(names, logprobs, strict=True)
        ],
        "text_offset": offsets,
    }
