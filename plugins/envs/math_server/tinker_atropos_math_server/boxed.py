r"""Finds the answer that a completion ends on: what stands in its last `\boxed{}`. Pure, and linear in the text.

Only what follows the thought counts. A box in a comment is none, and of several the last one decides, so that nothing
is gained by boxing one guess after the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

THOUGHT_BEGINS, THOUGHT_ENDS = "<think>", "</think>"

_BOX = re.compile(r"\\f?box(?:ed)?(?![A-Za-z])\s*")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
# `%` is a sign in prose (`50 % of 8`), a comment only where a line or a sentence begins with it.
_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)|(?:^|(?<=[.;:!?])|(?<=\\\\))[ \t]*(?<!\\)%[^\n]*", re.DOTALL | re.MULTILINE)
_BARE = re.compile(r"-?[0-9][0-9.,]*(?<![.,])|\\?[A-Za-z]+")


@dataclass(frozen=True, slots=True)
class Boxed:
    """`content` of the last box, None without one that closes; how many boxes there are."""

    content: str | None
    count: int


def after_thought(text: str) -> str:
    """Return what follows the thought; nothing if one was begun and not ended."""
    _, marker, tail = text.rpartition(THOUGHT_ENDS)
    if marker:
        return tail
    return "" if THOUGHT_BEGINS in text else text


def final_box(text: str) -> Boxed:
    r"""Return the last `\boxed{}` that stands in no other box; one around the whole content of another is unwrapped."""
    text = _COMMENT.sub(" ", text)
    closing = _closing(text)
    content: str | None = None
    count = 0
    end = -1
    for box in _BOX.finditer(text):
        if box.start() < end:
            continue
        count += 1
        start = box.end()
        if text[start : start + 1] != "{":
            bare = _BARE.match(text, start)
            content, end = (bare[0], bare.end()) if bare else (None, start)
        elif start in closing:
            end = closing[start] + 1
            content = text[start + 1 : end - 1]
        else:  # what stands behind it may be inside of it: no answer, unless another box follows and closes
            content, end = None, start
    return Boxed(None if content is None else _unwrapped(content), count)


def last_box(text: str) -> str | None:
    """Return the content of the last box of a worked solution."""
    return final_box(text).content


def _unwrapped(content: str) -> str:
    for _ in range(8):
        inner = _BOX.match(content.strip())
        whole = content.strip()
        if inner is None or whole[inner.end() : inner.end() + 1] != "{":
            break
        if _closing(whole).get(inner.end()) != len(whole) - 1:
            break
        content = whole[inner.end() + 1 : -1]
    return content


def _closing(text: str) -> dict[int, int]:
    """Return where each brace that opens is closed; escaped ones are signs of a set."""
    escaped = {match.start() + 1 for match in _ESCAPED.finditer(text)}
    opened: list[int] = []
    closing: dict[int, int] = {}
    for match in re.finditer(r"[{}]", text):
        place = match.start()
        if place in escaped:
            continue
        if match[0] == "{":
            opened.append(place)
        elif opened:
            closing[opened.pop()] = place
    return closing
