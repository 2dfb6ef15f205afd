"""Reads the fields of a request, each of one type; what is left at the end is neutral, harmless or refused."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tinker_atropos.errors import near

from tinker_atropos_managed_server.answers import Refused

# Options that would change what is sampled, or that nothing here can do, with the values that ask for nothing. null
# asks for nothing in all of them.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "audio_data": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "custom_logit_processor": (),
    "custom_params": (),
    "documents": ([],),
    "early_stopping": (False,),
    "ebnf": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image_data": (),
    "input_embeds": (),
    "json_schema": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "lora_path": (),
    "lora_request": (),
    "min_new_tokens": (0,),
    "min_p": (0,),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "multi_modal_data": (),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "regex": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_hidden_states": (False,),
    "stop_regex": (),
    "structural_tag": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "video_data": (),
    "web_search_options": (),
}

# Options that change nothing of what is answered.
_HARMLESS = frozenset(
    {
        "background",
        "cache_salt",
        "detokenize",
        "log_metrics",
        "metadata",
        "output_kind",
        "priority",
        "prompt_cache_key",
        "request_id",
        "return_text_in_logprobs",
        "rid",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "split",
        "store",
        "timeout",
        "user",
    }
)

# What is read, in one dialect or another; for hints at a slip of the fingers.
_OPTIONS = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "chat_template_kwargs",
        "continue_final_message",
        "echo",
        "ignore_eos",
        "include_stop_str_in_output",
        "input_ids",
        "logprob_start_len",
        "logprobs",
        "max_completion_tokens",
        "max_new_tokens",
        "max_tokens",
        "messages",
        "model",
        "n",
        "no_stop_trim",
        "prompt",
        "prompt_logprobs",
        "reasoning",
        "reasoning_effort",
        "return_logprob",
        "return_token_ids",
        "sampling_params",
        "seed",
        "skip_special_tokens",
        "stop",
        "stop_token_ids",
        "stream",
        "stream_options",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)


class Fields:
    """The fields of a JSON object, taken one by one; `finish` refuses what nobody took.

    `where` stands before a field's name in errors, such as `sampling_params.`. null is the same as absent.
    """

    def __init__(self, body: Any, where: str = "") -> None:
        if not isinstance(body, dict):
            raise Refused(f"{where.rstrip('.') or 'the body'} is {_kind(body)}; send a JSON object")
        self._left = dict(body)
        self._where = where

    def take(self, name: str) -> Any:
        """Return a field as it is."""
        return self._left.pop(name, None)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number within limits; true and false are none, 16.0 is 16."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(name, value, f"a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a finite number within limits."""
        value = self._left.pop(name, None)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        value = self._left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """Return a text."""
        value = self._left.pop(name, None)
        if value is not None and not isinstance(value, str):
            raise self.wrong(name, value, "a text")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object, empty where there is none."""
        value = self._left.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.wrong(name, value, "a JSON object")
        return value

    def sequence(self, name: str) -> Sequence[Any]:
        """Return a list, empty where there is none."""
        value = self._left.pop(name, None)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def wrong(self, name: str, value: Any, right: str) -> Refused:
        """Return the error for a field of the wrong type or out of range."""
        return Refused(f"{self._where}{name} is {_kind(value)}; send {right}", param=self._where + name)

    def finish(self) -> None:
        """Refuse what would change the sampling, and what is not known."""
        for name, value in self._left.items():
            if name in _HARMLESS or value is None:
                continue
            where = self._where + name
            if name not in _NEUTRAL:
                hint = near(name, _OPTIONS | _NEUTRAL.keys() | _HARMLESS)
                raise Refused(
                    f"{where} is not understood here.{hint} Leave it out", param=where, code="unknown_parameter"
                )
            if not any(
                value == neutral and isinstance(value, bool) is isinstance(neutral, bool) for neutral in _NEUTRAL[name]
            ):
                allowed = " or ".join(["null", *(repr(neutral) for neutral in _NEUTRAL[name])])
                raise Refused(
                    f"{where}={_short(value)} is not supported: it would change what is sampled, or asks for what a "
                    f"policy here can't do; leave it out, or send {allowed}",
                    param=where,
                    code="unsupported_parameter",
                )


def _kind(value: Any) -> str:
    return "missing" if value is None else _short(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "…"
