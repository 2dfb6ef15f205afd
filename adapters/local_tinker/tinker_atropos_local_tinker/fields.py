"""Reads the fields of JSON requests, each of one type; anything else is a `UserError` that names field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinker_atropos.errors import UserError

if TYPE_CHECKING:
    from aiohttp import web

MAX_NUMBER = 2**63 - 1  # of a request, a model or a sampler
MAX_TTL_SECONDS = 315_360_000  # ten years, as hosted


async def read_json(request: web.Request) -> tuple[dict[str, Any], bytes]:
    """Return the body, a JSON object, and its bytes."""
    raw = await request.read()
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise UserError(f"the body is no JSON object but {type(body).__name__}")
    return body, raw


def text(body: Mapping[str, Any], name: str) -> str:
    """Return a text that must be there."""
    value = optional_text(body, name)
    if not value:
        raise UserError(f"the request has no {name!r}; give a text")
    return value


def optional_text(body: Mapping[str, Any], name: str) -> str | None:
    """Return a text, or None where there is none."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{name}={value!r} is no text; give a string, or leave it out")
    return value


def whole(name: str, value: Any, low: int | None = 0, high: int | None = MAX_NUMBER) -> int:
    """Return a whole number within limits; true and false are none."""
    counts = isinstance(value, int) and not isinstance(value, bool)
    if not counts or (low is not None and value < low) or (high is not None and value > high):
        limits = " ".join(f"{word} {bound}" for word, bound in (("from", low), ("to", high)) if bound is not None)
        raise UserError(f"{name}={value!r} is out of range; give a whole number {limits}".rstrip())
    return int(value)


def number(name: str, value: Any) -> float:
    """Return a number; NaN is none, and neither are true and false."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{name}={value!r} is no number")
    try:
        found = float(value)
    except OverflowError as error:
        raise UserError(f"{name} is out of range; give a number that a float can hold") from error
    if math.isnan(found):
        raise UserError(f"{name} is NaN; give a number")
    return found


def flag(body: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return true or false, and the default where the field is left out or null."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name}={value!r} is neither true nor false")
    return default if value is None else value


def mapping(body: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    """Return a JSON object, or None where there is none."""
    value = body.get(name)
    if value is not None and not isinstance(value, dict):
        raise UserError(f"{name} is no JSON object but {type(value).__name__}; give {{...}}, or leave it out")
    return value


def metadata(body: Mapping[str, Any], name: str = "user_metadata") -> dict[str, str] | None:
    """Return a JSON object whose values are texts, or None where there is none."""
    found = mapping(body, name)
    for key, value in (found or {}).items():
        if not isinstance(value, str):
            raise UserError(f"{name}[{key!r}]={value!r} is no text; give strings only, such as {str(value)!r}")
    return found


def ttl_seconds(body: Mapping[str, Any]) -> int | None:
    """Return how long a checkpoint is to be kept, or None for ever."""
    value = body.get("ttl_seconds")
    return None if value is None else whole("ttl_seconds", value, 1, MAX_TTL_SECONDS)
