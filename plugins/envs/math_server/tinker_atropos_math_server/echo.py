r"""Brings expressions into a form in which one that is merely dressed up anew is the same. Pure.

Braces and brackets that bind nothing, neutral terms (`+0`, `\cdot 1`), spacing, and the ways to write fractions and
roots make no difference. It is for finding repetitions: it evaluates nothing, and is no LaTeX any more.
"""

from __future__ import annotations

import re

_MOST_PASSES = 40  # more than brackets nest in an answer

_ATOM = r"(?:[0-9.]+|[A-Za-z]|\\[A-Za-z]+)"
_FRACTION = re.compile(r"\\frac\{([^{}]*)\}\{([^{}]*)\}")
_ROOT = re.compile(r"\\sqrt(?:\[([^\[\]{}]*)\])?\{([^{}]*)\}")
_GROUP = re.compile(r"\{([^{}]*)\}")
_SIGN = {r"\cdot": "*", r"\times": "*", r"\ast": "*", r"\div": "/"}
_SIGNS = re.compile(r"\\(?:cdot|times|ast|div)(?![A-Za-z])")
_LETTER = re.compile(r"\\text\{\s*([A-Za-z])\s*\}")
_BRACKETS = (
    (re.compile(rf"\(({_ATOM})\)"), r"\1"),
    (re.compile(r"\((\([^()]*\))\)"), r"\1"),
    (re.compile(rf"\(({_ATOM}\^(?:{_ATOM}|\([^()]*\)))\)(?!\^)"), r"\1"),
)
_NEUTRAL = (
    (re.compile(r"[+-]0(?:\.0*)?(?![0-9.*^/!A-Za-z\\(])"), ""),
    (re.compile(r"(?<![^(=,])0(?:\.0*)?(?=[+-])"), ""),
    (re.compile(r"(?<![^(=,])\+"), ""),
    (re.compile(r"(?:\*|/|\^|(?<=\)))1(?![0-9.^/!])"), ""),
    (re.compile(r"(?<![0-9.^/A-Za-z)])1(?:\*|(?=\())"), ""),
    (re.compile(r"(?<![0-9])\*|\*(?![0-9])"), ""),
)


def with_letters(text: str) -> str:
    r"""Return a normal form in which single letters (the `d` of `\mathrm{d}x`) are out of their text command."""
    return _LETTER.sub(r"\1", text)


def canonical(text: str) -> str:
    """Return a normal form of an expression, or of a text with expressions, as that which stays of it."""
    text = _SIGNS.sub(lambda match: _SIGN[match[0]], with_letters(text))
    text = re.sub(r"\s+", "", text.replace(r"\{", "<").replace(r"\}", ">"))
    for _ in range(_MOST_PASSES):
        before = text
        text = _GROUP.sub(r"(\1)", _ROOT.sub(_as_power, _FRACTION.sub(r"((\1)/(\2))", text)))
        if text == before:
            break
    for _ in range(_MOST_PASSES):
        before = text
        for pattern, replacement in (*_BRACKETS, *_NEUTRAL):
            text = pattern.sub(replacement, text)
        text = _bare(text)
        if text == before:
            break
    return text


def terms(text: str) -> tuple[str, ...]:
    """Return the terms of a sum in canonical form with their signs, sorted, so that their order does not count."""
    found, deep = [""], 0
    for character in text:
        if character in "+-" and deep == 0 and found[-1] and found[-1][-1] not in "^/*+-":
            found.append("")
        deep += (character in "([<") - (character in ")]>")
        found[-1] += character
    return tuple(sorted(term if term.startswith("-") else "+" + term.removeprefix("+") for term in found))


def _as_power(match: re.Match[str]) -> str:
    return f"(({match[2]})^(1/{match[1] or 2}))"


def _bare(text: str) -> str:
    """Return a text without the brackets around the whole of it."""
    if not (text.startswith("(") and text.endswith(")")):
        return text
    deep = 0
    for place, character in enumerate(text):
        deep += (character == "(") - (character == ")")
        if deep == 0 and place < len(text) - 1:
            return text
    return text[1:-1] if "," not in text else text
