"""The three dialects of `/generate`: SGLang's, vLLM's and TRL's, told apart by their bodies."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tinker_atropos_managed_server.answers import Refused
from tinker_atropos_managed_server.fields import Fields
from tinker_atropos_managed_server.inference import Answer, Choice, body_numbers
from tinker_atropos_managed_server.prompts import RawPrompt, read_prompts
from tinker_atropos_managed_server.sampling_request import SamplingRequest, read_sampling, refuse_too_many
from tinker_atropos_managed_server.session import Dialect

# What each takes where a request does not say.
_SGLANG_TOKENS = 128
_OTHER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A request for `/generate`. `batch`: the client sent a list of prompts, and gets a list.

    `samplings` has one entry a prompt. `logprobs` and `score` ask for those of the answer and of the prompt;
    `score_from` is the first prompt token whose log-probability is wanted. `token_texts`: with their texts.
    """

    dialect: Literal["sglang", "vllm", "trl"]
    prompts: list[RawPrompt]
    samplings: list[SamplingRequest]
    batch: bool = False
    logprobs: bool = False
    score: bool = False
    score_from: int = 0
    token_texts: bool = False
    specials: bool = True


def read_generate_request(body: Any) -> GenerateRequest:
    """Read the body of `/generate`; raises `Refused` for what can't be done."""
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object; send one")
    if "prompts" in body:
        request = _trl(Fields(body))
    elif "prompt" in body:
        request = _vllm(Fields(body))
    elif "input_ids" in body or "text" in body:
        request = _sglang(Fields(body))
    else:
        raise Refused(
            "the body has no prompt; send 'input_ids' or 'text' (SGLang), 'prompt' (vLLM) or 'prompts' (TRL)",
            param="prompt",
        )
    refuse_too_many(request.samplings)
    return request


def _sglang(fields: Fields) -> GenerateRequest:
    ids, text = fields.take("input_ids"), fields.take("text")
    if ids is not None and text is not None:
        raise Refused("both input_ids and text are given; send one of them", param="input_ids")
    prompts, batch = read_prompts(text if ids is None else ids, "text" if ids is None else "input_ids")
    fields.text("model")
    params = fields.take("sampling_params")
    per_prompt = params if isinstance(params, list) else [params] * len(prompts)
    if len(per_prompt) != len(prompts):
        raise Refused(
            f"sampling_params has {len(per_prompt)} entries for {len(prompts)} prompts; send one each, or one object",
            param="sampling_params",
        )
    samplings = [_sglang_sampling(one) for one in per_prompt]
    logprobs = fields.flag("return_logprob")
    start = fields.whole("logprob_start_len", -1, 2**31 - 1)
    top = fields.whole("top_logprobs_num", 0, 2**31 - 1)
    _refuse_top("top_logprobs_num", top, most=1)
    if fields.take("token_ids_logprob"):
        raise Refused("token_ids_logprob is more than a policy tells; leave it out", param="token_ids_logprob")
    texts = fields.flag("return_text_in_logprobs")
    _refuse_stream(fields)
    fields.finish()
    score = logprobs and start is not None and start >= 0
    return GenerateRequest("sglang", prompts, samplings, batch, logprobs, score, start or 0, texts)


def _sglang_sampling(params: Any) -> SamplingRequest:
    fields = Fields({} if params is None else params, "sampling_params.")
    fields.text("model")
    sampling = read_sampling(fields, default_max_tokens=_SGLANG_TOKENS, least_max_tokens=0)
    fields.finish()
    return sampling


def _vllm(fields: Fields) -> GenerateRequest:
    prompt = fields.take("prompt")
    if isinstance(prompt, dict):
        inner = Fields(prompt, "prompt.")
        ids, text = inner.take("prompt_token_ids"), inner.take("prompt")
        inner.finish()
        prompt = ids if ids is not None else text
    prompts, batch = read_prompts(prompt, "prompt")
    if batch:
        raise Refused("prompt is a list of prompts; vLLM's /generate takes one, send them one by one", param="prompt")
    fields.text("model")
    score = fields.take("prompt_logprobs")
    if score is not None and (type(score) is not int or score < 0):
        raise fields.wrong("prompt_logprobs", score, "0 or 1")
    _refuse_top("prompt_logprobs", score, most=1)
    logprobs = fields.whole("logprobs", 0, 2**31 - 1)
    _refuse_top("logprobs", logprobs, most=1)
    sampling = read_sampling(fields, default_max_tokens=_OTHER_TOKENS, least_max_tokens=0 if score is not None else 1)
    specials = fields.flag("add_special_tokens", True)
    _refuse_stream(fields)
    fields.finish()
    return GenerateRequest(
        "vllm", prompts, [sampling], logprobs=logprobs is not None, score=score is not None, specials=specials
    )


def _trl(fields: Fields) -> GenerateRequest:
    value = fields.take("prompts")
    prompts, batch = read_prompts(value, "prompts")
    if not batch:
        raise Refused("prompts is one prompt; send a list of them", param="prompts")
    sampling = read_sampling(fields, default_max_tokens=_OTHER_TOKENS)
    fields.whole("logprobs", 0, 1)
    fields.finish()
    return GenerateRequest("trl", prompts, [sampling] * len(prompts), batch=True)


def _refuse_top(name: str, value: int | None, most: int) -> None:
    if value is not None and value > most:
        raise Refused(
            f"{name}={value} asks for the log-probabilities of tokens that were not there, and a policy tells none; "
            f"send 0 or {most}",
            param=name,
            code="unsupported_parameter",
        )


def _refuse_stream(fields: Fields) -> None:
    if fields.flag("stream"):
        raise Refused("stream is only to be had at /v1/chat/completions and /v1/completions", param="stream")


def generate_body(dialect: Dialect, request: GenerateRequest, answers: Sequence[Answer]) -> Any:
    """Return the body in the dialect of the request."""
    if request.dialect == "vllm":
        return _vllm_body(dialect, request, answers[0])
    if request.dialect == "trl":
        return {
            "prompt_ids": [answer.prompt.tolist() for answer in answers],
            "completion_ids": [choice.tokens for answer in answers for choice in answer.choices],
            "logprobs": [body_numbers(choice.logprobs) for answer in answers for choice in answer.choices],
            "policy_step": answers[0].ref.step,
        }
    made = [_sglang_choice(dialect, request, answer, choice) for answer in answers for choice in answer.choices]
    return made if request.batch or len(made) > 1 else made[0]


def _sglang_choice(dialect: Dialect, request: GenerateRequest, answer: Answer, choice: Choice) -> dict[str, Any]:
    finish: dict[str, Any] = {"type": choice.finish_reason}
    if choice.finish_reason == "length":
        finish["length"] = len(choice.tokens)
    else:
        finish["matched"] = choice.turn.end if choice.turn.matched is None else choice.turn.matched
    meta: dict[str, Any] = {
        "id": uuid.uuid4().hex,
        "finish_reason": finish,
        "prompt_tokens": len(answer.prompt),
        "completion_tokens": len(choice.tokens),
        "cached_tokens": 0,
        "weight_version": str(answer.ref.step),
    }
    if request.logprobs:
        meta["output_token_logprobs"] = _triples(dialect, request, choice.tokens, choice.logprobs)
    if answer.prompt_logprobs is not None:
        start = request.score_from
        prompt = answer.prompt.tolist()
        meta["input_token_logprobs"] = _triples(dialect, request, prompt[start:], answer.prompt_logprobs[start:])
    return {"text": choice.text, "output_ids": choice.tokens, "meta_info": meta}


def _triples(dialect: Dialect, request: GenerateRequest, tokens: list[int], logprobs: list[float]) -> list[Any]:
    numbers = body_numbers(logprobs)
    if not request.token_texts:
        return [(logprob, token, None) for logprob, token in zip(numbers, tokens, strict=True)]
    text = dialect.vocabulary.token_text
    return [(logprob, token, text(token)) for logprob, token in zip(numbers, tokens, strict=True)]


def _vllm_body(dialect: Dialect, request: GenerateRequest, answer: Answer) -> dict[str, Any]:
    raw = request.prompts[0]
    body: dict[str, Any] = {
        "text": [choice.text for choice in answer.choices],
        "prompt": raw if isinstance(raw, str) else dialect.vocabulary.decode(raw),
        "finish_reasons": [choice.finish_reason for choice in answer.choices],
        "prompt_token_ids": answer.prompt.tolist(),
        "token_ids": [choice.tokens for choice in answer.choices],
        "policy_step": answer.ref.step,
    }
    if request.logprobs:
        body["logprobs"] = [
            [
                [{str(token): logprob}]
                for token, logprob in zip(choice.tokens, body_numbers(choice.logprobs), strict=True)
            ]
            for choice in answer.choices
        ]
    if answer.prompt_logprobs is not None:
        numbers = body_numbers(answer.prompt_logprobs)
        body["prompt_logprobs"] = [
            None if logprob is None else {str(token): logprob}
            for token, logprob in zip(body["prompt_token_ids"], numbers, strict=True)
        ]
    return body
