r"""Decides whether an answer is right: what is plain at once, the rest by math-verify in a pool of workers.

Most answers need no computer algebra: those spelled like the gold, plain numbers, text, numerals with a base, and
whatever is nothing that could be evaluated. What is left goes to a worker, whose processor time and memory are bounded.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, TypeAlias

from tinker_atropos.grading import Limits, WorkerPool

from tinker_atropos_math_server import echo, latex

Reason: TypeAlias = Literal["", "none", "long", "echo", "unworked", "wild", "ungraded"]

REMEMBERED = 16_384  # verdicts of workers
MAX_PARTS = 4  # of a chain of equations
MAX_OPERATORS = 3  # of an answer to be given as a number, such as `2^{10} - 1`; more are a calculation left to do
MAX_QUESTION = 20_000  # characters in which echoes are looked for

_WILD = re.compile(
    r"\^\s*\{?\s*\(?\s*-?[0-9]{5,}"  # a power too large to write down
    r"|[0-9)}]\s*\^\s*\{?\s*\(?\s*[0-9]+\s*[)}]?\s*\^"  # a tower of powers of numbers
    r"|[0-9]{5,}\s*!|[!)\]}]\s*!|!\s*\}?\s*\^|\^\s*\{?[^{}]{0,20}!"  # factorials of large numbers
    r"|[0-9]{61}"
)
_EVALUATES = re.compile(
    r"[+*^!|]|(?<=[^\s({\[,])\s*-|/|\\(?:cdot|times|div|sqrt|[dt]?frac|d?binom|sum|prod|int|lim|log|ln|sin|cos|tan|cot|"
    r"sec|csc|arc[a-z]+|l?floor|l?ceil|gcd|det|pmod|bmod)(?![A-Za-z])"
)
_CALCULUS = re.compile(r"\\(?:i*int|oint|sum|prod|lim(?:sup|inf)?)(?![A-Za-z])")
_OPERATORS = re.compile(r"[+*^!/]|(?<=[^\s({\[,])\s*-|\\(?:cdot|times|div|sqrt|frac|d?binom)(?![A-Za-z])")
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_ADJECTIVES = {"2": "binary", "3": "ternary", "8": "octal", "10": "decimal", "16": "hexadecimal"}
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_NAME = re.compile(
    r"\s*(?:\\text\{[^{}]*\}|"
    r"[A-Za-z](?:_\{?[A-Za-z0-9]+\}?|')?(?:\s*\([A-Za-z0-9, ]{1,20}\))?|\\[A-Za-z]+|[A-Za-z ]{2,40})\s*"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """`right` is None where a worker was stopped; `reason` says why an answer is wrong that was not evaluated."""

    right: bool | None
    reason: Reason = ""


class Grader:
    """Compares answers; its workers start with the first that needs one and end with `close`."""

    def __init__(self, *, workers: int | None, limits: Limits) -> None:
        self.pool: WorkerPool[list[Any], bool] = WorkerPool(
            "tinker_atropos_math_server.equality:equal", workers=workers, limits=limits
        )
        self._known: OrderedDict[str, bool | None] = OrderedDict()

    async def grade(self, gold: str, answer: str | None, question: str = "") -> Verdict:
        """Return the verdict on the content of a box, None: there was no box.

        An answer that only repeats a part of the question to have it evaluated is wrong.
        """
        decided = decide(gold, answer, question)
        if isinstance(decided, Verdict):
            return decided
        for comparison in decided:  # each must hold
            right = await self._ask(comparison)
            if not right:
                return Verdict(right, "" if right is False else "ungraded")
        return Verdict(True)

    async def close(self) -> None:
        """End the workers; a later answer starts new ones."""
        await self.pool.close()

    async def _ask(self, comparison: list[Any]) -> bool | None:
        name = repr(comparison)
        if name in self._known:
            self._known.move_to_end(name)
            return self._known[name]
        right = await self.pool.call(comparison)
        self._known[name] = right
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return right


@dataclass(frozen=True, slots=True)
class Gold:
    """A right answer in its forms. `value` is without unit, percent sign and name (`x =`), `number` where it is one."""

    text: str
    key: str
    words: str | None
    based: tuple[str, str] | None
    value: str
    unit: str
    percent: bool
    number: tuple[Fraction, int] | None
    equation: bool


@functools.lru_cache(maxsize=16_384)
def read_gold(answer: str) -> Gold:
    """Return the forms of a right answer."""
    text = latex.normal(answer)
    whole, percent = latex.percentage(_MEMBER.sub("", text))
    quantity = latex.quantity(whole) if "\\text" in whole else latex.Quantity(whole, "")
    return Gold(
        text=text,
        key=latex.key(answer),
        words=latex.words(text),
        based=latex.based(text),
        value=quantity.value,
        unit=quantity.unit,
        percent=percent,
        number=latex.number(quantity.value),
        equation="=" in text,
    )


def decide(gold_text: str, answer: str | None, question: str = "") -> Verdict | list[list[Any]]:
    """Return the verdict, or the comparisons that must all hold for the answer to be right."""
    if answer is None or not answer.strip():
        return Verdict(False, "none")
    if len(answer) > latex.MAX_ANSWER:
        return Verdict(False, "long")
    gold, text = read_gold(gold_text), latex.normal(answer)
    spelled = latex.unspaced(text)
    if not spelled:
        return Verdict(False, "none")
    if spelled == gold.key:
        return Verdict(True)
    if latex.depth(text) > latex.MAX_DEPTH:
        return Verdict(False, "wild")
    choices = latex.choice(gold.text), latex.choice(text)
    if None not in choices:
        return Verdict(choices[0] == choices[1])
    if gold.words is not None:
        return Verdict(gold.words in (latex.words(text), latex.letters(text)))
    based = latex.based(text)
    if gold.based is not None or based is not None:
        if gold.based is None and based is not None and not _names_base(question, based[1]):
            return Verdict(False)
        return Verdict(_same_numeral(gold.based or (gold.key.lower(), ""), based or (spelled.lower(), "")))
    if latex.words(text) is not None and "=" not in text:
        return Verdict(False)
    if _WILD.search(text):
        return Verdict(False, "wild")
    if "$" in text.replace("\\$", ""):
        return Verdict(False)  # prose with formulas in it, of which math-verify would take one
    if _echoes(gold, text, question):
        return Verdict(False, "echo")
    if _unworked(gold, text):
        return Verdict(False, "unworked")
    return _compared(gold, text)


def _compared(gold: Gold, text: str) -> Verdict | list[list[Any]]:
    text = _MEMBER.sub("", text)
    if "=" in text and not gold.equation:
        return _chain(gold, text)
    whole, percent = latex.percentage(text)
    quantity = latex.quantity(whole)
    if "?" not in (gold.unit, quantity.unit) and gold.unit and quantity.unit and gold.unit != quantity.unit:
        return Verdict(False)
    value = quantity.value
    if gold.equation and "=" not in value:
        name, _, bare = gold.value.partition("=")
        if _NAME.fullmatch(name) is None or "=" in bare:
            return Verdict(False)
        gold = read_gold(bare)
    number = latex.number(value)
    if number is not None and gold.number is not None:
        return Verdict(any(_same_number(gold.number[0], n) for n in _scaled(number, gold.percent, percent)))
    if number is not None and number[1]:
        places = latex.places(value)
        if number[1] < latex.ENOUGH_DIGITS:
            return Verdict(False)
        return [[gold.value, [number[0].numerator, number[0].denominator, places]]]
    signs = [" \\%" if sign and not (gold.percent and percent) else "" for sign in (gold.percent, percent)]
    if latex.several(value) and not latex.several(gold.value):
        return Verdict(False)  # of which math-verify would make a set, and of `7, 7` the set of one
    wanted, given = latex.told_apart(gold.value, value)
    return [[wanted + signs[0], given + signs[1]]]


def _chain(gold: Gold, text: str) -> Verdict | list[list[Any]]:
    """Read `x = 5` and `2 + 3 = 5` where the gold is no equation: every side that is no name must be right."""
    if re.search(r",|\\text\{\s*(?:or|and)\b|\\le|\\ge|\\ne|<|>", text):
        return [[gold.value, text]]
    sides = text.split("=")
    if len(sides) > 1 and _NAME.fullmatch(sides[0]):
        sides = sides[1:]
    if not 1 <= len(sides) <= MAX_PARTS or not all(side.strip() for side in sides):
        return Verdict(False)
    wanted: list[list[Any]] = []
    for side in sides:
        decided = Verdict(True) if latex.unspaced(side.strip()) == gold.key else _compared(gold, side.strip())
        if isinstance(decided, list):
            wanted.extend(decided)
        elif not decided.right:
            return decided
    return wanted or Verdict(True)


def _same_numeral(one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Digits must be the same, and the bases where both are given."""
    return one[0] == other[0] and (one[1] == other[1] or "" in (one[1], other[1]))


def _names_base(question: str, base: str) -> bool:
    """Return whether a question says a base; beside a gold without one the answer's must be told there."""
    names = [base, *(name for name, value in latex.BASES.items() if value == base)]
    said = rf"(?:\\text\{{\s*)?(?:{'|'.join(map(re.escape, names))})(?![0-9A-Za-z])"
    adjective = _ADJECTIVES.get(base, f"base-{re.escape(base)}")
    return re.search(rf"\bbase[\s$~-]*{said}|\b{adjective}\b", question, re.IGNORECASE) is not None


def _scaled(number: tuple[Fraction, int], gold_percent: bool, percent: bool) -> Sequence[tuple[Fraction, int]]:
    """`15` and `15\\%` are both written for 15 %; so is `0.15` where the gold has the sign."""
    if gold_percent == percent:
        return (number,)
    factor = Fraction(100) if gold_percent else Fraction(1, 100)
    return (number, (number[0] * factor, number[1]))


def _same_number(gold: Fraction, number: tuple[Fraction, int]) -> bool:
    value, significant = number
    if value == gold:
        return True
    if significant < latex.ENOUGH_DIGITS or _terminates(gold):
        return False
    # A decimal for what has none: equal when it is the gold, rounded.
    return abs(value - gold) * 2 * Fraction(10) ** _places(value) <= 1


def _places(value: Fraction) -> int:
    """Return how many decimal places a terminating number has."""
    places = 0
    while value.denominator != 1 and places < latex.MAX_EXPONENT:
        value *= 10
        places += 1
    return places


def _terminates(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _echoes(gold: Gold, text: str, question: str) -> bool:
    """Return whether an answer is an expression that the question holds, left as it was: each side that is no name."""
    if not question or len(question) > MAX_QUESTION:
        return False
    sides = [text] if gold.equation else _sides(text)
    return all(_is_echo(gold, side, question) for side in sides)


def _is_echo(gold: Gold, text: str, question: str) -> bool:
    text = re.sub(r"\\text\{[^{}]*\}", "", echo.with_letters(text)).strip(" .,:;?!=")
    spelled = echo.canonical(text)
    if len(spelled) < 3 or latex.number(text) is not None or latex.number(spelled) is not None:
        return False
    if not _EVALUATES.search(text) or spelled == echo.canonical(gold.text):
        return False
    asked = _asked(question)
    return spelled in asked.key or echo.terms(spelled) in asked.sums


def _unworked(gold: Gold, text: str) -> bool:
    """Return whether an answer to be given as a number is a calculation: none of its sides is worked out."""
    return gold.number is not None and all(
        _CALCULUS.search(side) is not None or len(_OPERATORS.findall(side)) > MAX_OPERATORS for side in _sides(text)
    )


def _sides(text: str) -> list[str]:
    """Return the sides of an equation that are no name; a text without `=`, but for those in braces, is one."""
    sides, deep = [""], 0
    for character in text:
        deep += (character == "{") - (character == "}")
        if character == "=" and deep == 0:
            sides.append("")
        else:
            sides[-1] += character
    sides = [side for side in sides if side.strip()]
    return [side for side in sides if _NAME.fullmatch(side) is None] or [text]


@dataclass(frozen=True, slots=True)
class _Asked:
    key: str
    sums: frozenset[tuple[str, ...]]


@functools.lru_cache(maxsize=4_096)
def _asked(question: str) -> _Asked:
    """Return a question in the form in which echoes are looked for, and the terms of each formula in it."""
    formulas = [side for formula in _FORMULA.findall(question) for side in "".join(formula).split("=")]
    return _Asked(
        echo.canonical(latex.normal(question.replace("$", ""))),
        frozenset(echo.terms(echo.canonical(latex.normal(formula))) for formula in formulas if formula.strip()),
    )
