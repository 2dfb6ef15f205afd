"""Which variables a chat template may be given, by the configuration or by a request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from keyword import iskeyword
from typing import Any

RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What is handed to the template here; a variable of that name would be lost or collide."""

_JINJA_WORDS = frozenset({"true", "false", "none"})


def is_variable(name: str) -> bool:
    """Whether Jinja takes `name` as that of a variable."""
    return name.isidentifier() and not iskeyword(name) and name not in _JINJA_WORDS


def is_literal(value: Any) -> bool:
    """Whether a value can be written in Jinja: null, truth, text, a finite number, and lists and mappings of them."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_literal(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_literal, value))
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
