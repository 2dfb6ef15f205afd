r"""Finds the final answer in a completion and compares it with the right one. Pure, and bounded for any text.

Where the answer stands, the later marker winning:

    #### 18         GSM8K's own; a markdown heading of four hashes is not taken for one
    \boxed{18}      the last one, braces nested or not

Without a marker the last number counts. Of several answers in one place the last counts. Plain numbers and fractions
are compared exactly, here. Anything else that reads as an expression (`\frac{6^2}{2}`, `3 \times 6`) is left to
math-verify, in a process of its own: see `verifier.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias

Place: TypeAlias = Literal["hash", "boxed", "number", "none"]

MAX_TEXT = 20_000  # characters read, from the end: the answer comes last
MAX_CONTENT = 1_000  # characters of one marker
MAX_EXPRESSION = 120  # characters handed to math-verify
MAX_DEPTH = 6  # of brackets in such an expression; its parser takes twice as long for each
MAX_DIGITS = 40  # of one number; Python itself refuses 4,300
MAX_EXPONENT = 30  # of a number in scientific notation

_CURRENCY = r"[$€£¥₹]"
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,8}(?![0-9])(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|(?<![\w.])\.[0-9]+)"
_UNSIGNED = rf"{_DIGITS}(?:[eE][+-]?[0-9]+(?![0-9A-Za-z]))?"
_SIGNED = rf"(?:[-+]\s?)?{_CURRENCY}?\s?-?{_UNSIGNED}"
# A sign after a digit, a letter or a bracket is an operator or a range; a digit after a letter or ^ belongs to a word.
_IN_TEXT = rf"(?:(?<![\w)\]}}])-)?(?:{_CURRENCY}\s?-?)?(?<![A-Za-z_^]){_UNSIGNED}"
_LATEX_FRACTION = r"\\[dt]?frac\s*\{\s*(-?[0-9.,]+)\s*\}\s*\{\s*(-?[0-9.,]+)\s*\}"
# 18 dollars, 5%, 60 km/h, 4 m^2, 3 eggs.
_UNITS = r"\s*(?:%|°|[A-Za-z°][A-Za-z°'’.\s-]*(?:\s*/\s*[A-Za-z]+)?(?:\^\{?[0-9]\}?|[²³])?|/\s*[A-Za-z]+)?[\s.!]*"
# At least one real word: `x + 18` is not 18 with something before it.
_WORDS_BEFORE = r"(?:(?=[A-Za-z\s]{0,20}?[A-Za-z]{2})[A-Za-z][A-Za-z'’\s,-]*:?\s+|:\s*)?"

_PLAIN = re.compile(rf"{_WORDS_BEFORE}({_SIGNED}){_UNITS}", re.ASCII)
_FRACTION = re.compile(
    rf"{_WORDS_BEFORE}(-)?\s*{_CURRENCY}?(?:([0-9]+)\s*(?=\\)|([0-9]+)\s+(?=[0-9]+\s*/))?"
    rf"(?:{_LATEX_FRACTION}|({_DIGITS})\s*/\s*({_DIGITS})){_UNITS}",
    re.ASCII,
)
_LAST_NUMBER = re.compile(rf"(-)?{_LATEX_FRACTION}|({_IN_TEXT})(?:/({_DIGITS})(?!/))?", re.ASCII)
_NUMBER = re.compile(_SIGNED, re.ASCII)

_HASH = re.compile(r"#{4,}((?:(?!####)[^\n])*)")
_BOXED = re.compile(r"\\f?box(?:ed)?\s*")
_HEADING = re.compile(r"\W*[0-9]+\s*[.):]\s+[A-Za-z]", re.ASCII)
_STARTS_AS_ANSWER = re.compile(r"[\s*_$€£¥₹(\\+-]*(?:[0-9.]|\\)|.*\banswer\b|.*=", re.ASCII | re.IGNORECASE)
_SEVERAL = re.compile(r",(?![0-9]{3}(?![0-9]))|;|\bor\b|\band\b|\n")
_EQUALS = re.compile(r"=|\\approx|≈")
_OPERATOR = re.compile(r"[+*/^()×÷]|\\(?:[dt]?frac|sqrt|times|cdot|div)(?![A-Za-z])|[0-9)}]\s*-")
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,!;: ]|~|\\(?:left|right|displaystyle|quad|qquad)(?![A-Za-z])")
_KNOWN_COMMAND = re.compile(r"\\(?:[dt]?frac|sqrt|times|cdot|div)(?![A-Za-z])")
_SPACED_THOUSANDS = re.compile(r"(?<=[0-9]) (?=[0-9]{3}(?![0-9]))(?<![0-9]{4} )")  # 1 000 and 12 345 678
_REMARK = re.compile(
    rf"^({_SIGNED}[^()\n]{{0,40}}?)\s*\([^()]*[A-Za-z]{{2}}[^()]*\)\s*$", re.ASCII
)  # 18 (eggs in 2 boxes)
_WORD = re.compile(r"[A-Za-z]{2,}")
_TRAILING_WORDS = re.compile(r"(?<=[0-9)}\s])\s*[A-Za-z°%][A-Za-z°%'’\s]*$")
_MATH = re.compile(
    r"\$\$([^$]+)\$\$|\$([^$\n]+)\$|\\\(((?:(?!\\\)).){1,300})\\\)|\\\[((?:(?!\\\]).){1,300})\\\]", re.DOTALL
)
_MINUS = str.maketrans({"−": "-", "﹣": "-", "－": "-", "\u00a0": " ", "\u202f": " "})


@dataclass(frozen=True, slots=True)
class Answer:
    """What a completion gives as its answer.

    At most one of `value` and `expression` is set: a number, or what only math-verify can read. Neither: there is no
    answer, or none that is a finite number of sane size (then `text` shows it).
    """

    place: Place
    text: str = ""
    value: Fraction | None = None
    expression: str | None = None

    @property
    def given(self) -> bool:
        """Whether there is anything to compare."""
        return self.value is not None or self.expression is not None

    @property
    def marked(self) -> bool:
        """Whether it stands behind a marker."""
        return self.given and self.place in ("hash", "boxed")


def number(text: str) -> Fraction | None:
    """Return the exact value of `-1,234.50`, `$18` or `1.8e1`; None if it is no number or not of sane size."""
    text = text.translate(_MINUS).strip()
    return _value(text) if len(text) <= 2 * MAX_DIGITS and _NUMBER.fullmatch(text) else None


def final_answer(text: str) -> Answer:
    """Return the answer that a completion ends on."""
    text = text[-MAX_TEXT:].translate(_MINUS)
    marker = _last_marker(text)
    if marker is not None:
        place, content = marker
        return _read(place, content[:MAX_CONTENT])
    return _from_prose(text)


def bare_integer(text: str) -> Fraction | None:
    """Return the value of a text that is nothing but an integer in its shortest form, as a sum must be; else None."""
    text = text.strip()
    return Fraction(int(text)) if re.fullmatch(r"-?(?:0|[1-9][0-9]{0,8})", text, re.ASCII) else None


def _last_marker(text: str) -> tuple[Place, str] | None:
    places: list[tuple[int, Place, str]] = []
    end = len(text.rstrip())
    for match in _HASH.finditer(text):
        content = match[1].strip()
        # `#### Step 2` and `#### 1. Apples` are headings, unless nothing follows them.
        heading = _HEADING.match(content) is not None or (content != "" and not _STARTS_AS_ANSWER.match(content))
        if not heading or match.end() >= end:
            places.append((match.start(), "hash", content))
    boxes = list(_BOXED.finditer(text))
    if boxes:
        last = boxes[-1]
        places.append((last.start(), "boxed", _braced(text, last.end())))
    if not places:
        return None
    _, place, content = max(places)
    return place, content


def _braced(text: str, start: int) -> str:
    """Return what stands in the braces that open at `start`, or the bare token there; empty if they never close."""
    if text[start : start + 1] != "{":
        bare = re.compile(r"-?[0-9][0-9.,]*").match(text, start)
        return bare[0] if bare else ""
    depth = 0
    for position in range(start, min(len(text), start + MAX_CONTENT)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + 1 : position]
    return ""


def _read(place: Place, content: str) -> Answer:
    """Read what stands behind a marker."""
    shown = content.strip()
    clean = _REMARK.sub(r"\1", _SPACED_THOUSANDS.sub("", _clean(content)))
    parts = [part for part in (_trimmed(piece) for piece in _SEVERAL.split(clean)) if part]
    if not parts:
        return Answer(place, shown)
    last = _EQUALS.split(parts[-1])[-1].strip()
    plain = _PLAIN.fullmatch(last)
    if plain:
        return Answer(place, shown, _value(plain[1]))
    fraction = _FRACTION.fullmatch(last)
    if fraction:
        return Answer(place, shown, _mixed(*fraction.groups()))
    expression = _expression(last)
    if expression is not None:
        return Answer(place, shown, expression=expression)
    if _OPERATOR.search(last) and not _WORD.search(_KNOWN_COMMAND.sub(" ", last)):
        return Answer(place, shown)  # an expression too wild to evaluate: not a number, so never its last digits
    return Answer(place, shown, _last_number(last))


def _from_prose(text: str) -> Answer:
    matches = list(_LAST_NUMBER.finditer(text))
    if not matches:
        return Answer("none")
    last = matches[-1]
    for math in _MATH.finditer(text):
        if math.start() <= last.start() and last.end() <= math.end():
            inside = next(group for group in math.groups() if group is not None)
            if _OPERATOR.search(inside) and len(inside) <= MAX_CONTENT:
                return _read("number", inside)
    return Answer("number", last[0], _token(last))


def _last_number(text: str) -> Fraction | None:
    matches = list(_LAST_NUMBER.finditer(text))
    return _token(matches[-1]) if matches else None


def _token(match: re.Match[str]) -> Fraction | None:
    minus, above, below, plain, divisor = match.groups()
    if above is not None:
        return _mixed(minus, None, None, above, below, None, None)
    value = _value(plain)
    return value if divisor is None else _divide(value, _value(divisor))


def _mixed(
    minus: str | None,
    whole: str | None,
    whole_before_slash: str | None,
    above: str | None,
    below: str | None,
    dividend: str | None,
    divisor: str | None,
) -> Fraction | None:
    r"""Return the value of `-1 \frac{1}{2}`, `1 1/2`, `3/4`."""
    part = _divide(_value(above or dividend or ""), _value(below or divisor or ""))
    whole = whole or whole_before_slash
    if part is not None and whole is not None:
        base = _value(whole)
        part = None if base is None else base + part
    return -part if minus and part is not None else part


def _divide(above: Fraction | None, below: Fraction | None) -> Fraction | None:
    return None if above is None or below is None or below == 0 else above / below


def _value(text: str) -> Fraction | None:
    """Return the value of what `_SIGNED` matches."""
    digits = re.sub(rf"[,\s]|{_CURRENCY}", "", text)
    mantissa, _, exponent = digits.lower().partition("e")
    if not mantissa or len(mantissa) > MAX_DIGITS or len(exponent) > 4 or abs(int(exponent or 0)) > MAX_EXPONENT:
        return None
    try:
        return Fraction(digits)
    except (ValueError, ZeroDivisionError):
        return None


def _clean(content: str) -> str:
    """Strip what carries no value: text commands, spacing, emphasis, math delimiters."""
    content = _TEXT_COMMAND.sub(r" \1 ", content)
    content = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "°", content)
    content = content.replace("{,}", ",").replace("\\$", "$").replace("\\%", "%")
    content = re.sub(r"(?<=[0-9])\\[,!;]\s?(?=,?[0-9])|\\!", "", content)  # 1\,234 and 1,\!234 are one number
    content = re.sub(r"(?<=[0-9])\s*x\s*(?=[0-9])", "*", _SPACING.sub(" ", content))
    content = re.sub(r"\\[()\[\]]", " ", content).strip().strip("*_").strip()
    if content.endswith("$"):
        content = content[:-1]
    if content.startswith("$") and not re.match(r"\$\s?-?[0-9.]", content):
        content = content[1:]
    return _trimmed(content.strip().strip("*_"))


def _trimmed(text: str) -> str:
    return text.rstrip(" .,:\n").lstrip(" ,:\n")  # not a point before the digits of .5


def _expression(text: str) -> str | None:
    """Return what math-verify may evaluate: short, flat, numbers only, one small power at most; else None."""
    text = _trimmed(_TRAILING_WORDS.sub("", text))
    text = re.sub(rf"{_CURRENCY}", "", text)
    if len(text) > MAX_EXPRESSION or not _OPERATOR.search(text) or not re.search(r"[0-9]", text):
        return None
    rest = _KNOWN_COMMAND.sub(" ", text)
    if re.search(r"[^0-9.,\s+*/^()\[\]{}×÷-]", rest) or re.search(r"[0-9]{16}", text) or _depth(text) > MAX_DEPTH:
        return None
    text = text.replace("**", "^").replace("×", r"\times ").replace("÷", r"\div ")
    powers = re.findall(r"\^\s*\{?\s*(-?[0-9]+)?", text)
    if len(powers) > 1 or any(not power or len(power.lstrip("-")) > 2 for power in powers):
        return None
    return re.sub(r"(?<=[0-9)])\s*\(", r" \\cdot (", text)  # which would else be read as a mixed number


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest
