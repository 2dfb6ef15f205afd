r"""What a grading worker runs: math-verify on two answers, and what it gets wrong. Imported in workers only.

`verify` rounds to six places, so that `.0000672` and `.0000673` are one to it; here the relative difference counts.
"""

from __future__ import annotations

from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr, Float, Rational

MAX_RELATIVE = 1e-6


def equal(question: list[Any]) -> bool:
    """Return whether `[gold, answer]` in LaTeX are one value; `[gold, [numerator, denominator, places]]`: one number.

    A number with `places` digits behind the point is equal to a gold that rounds to it.
    """
    gold_text, answer_text = question
    try:
        gold = _parsed(gold_text)
        if not gold:
            return False
        if not isinstance(answer_text, str):
            return _rounds_to(gold[0], *answer_text)
        answer = _parsed(answer_text)
        if not answer or not verify(gold[0], answer[0], timeout_seconds=None, allow_set_relation_comp=True):
            return False
        return _near(gold[0], answer[0])
    except (Exception, RecursionError, MemoryError):
        return False


def reference(question: list[str]) -> bool:
    """Return math-verify's own verdict on two answers, without anything of ours."""
    gold, answer = question
    try:
        return bool(verify(_parsed(gold), _parsed(answer), timeout_seconds=None))
    except (Exception, RecursionError, MemoryError):
        return False


def _parsed(text: str) -> list[Any]:
    return list(
        parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    )


def _rounds_to(gold: Any, numerator: int, denominator: int, places: int) -> bool:
    gold = getattr(gold, "rhs", gold)
    if not isinstance(gold, Expr) or gold.free_symbols:
        return False
    value = gold.doit().evalf(40)
    half = Rational(1, 2 * 10**places)
    return bool(value.is_real and abs(value - Rational(numerator, denominator)) <= half)


def _near(gold: Any, answer: Any) -> bool:
    """Return False for two numbers that only rounding makes equal; anything else is left to math-verify."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.free_symbols or answer.free_symbols:
        return True
    if not (gold.has(Float) or answer.has(Float)):
        return True
    first, second = gold.doit().evalf(20), answer.doit().evalf(20)
    if not (first.is_number and second.is_number) or first == 0:
        return True
    # Of `10\%` math-verify makes 10 as well as 0.1.
    return any(bool(abs(first - scale * second) <= MAX_RELATIVE * abs(first)) for scale in (1, 100, Rational(1, 100)))


for _text in (r"\frac{\sqrt{2}}{2}", r"(1,2]", r"x^2+1=0", r"\begin{pmatrix}1\\2\end{pmatrix}"):
    equal([_text, _text + " "])  # builds the parser's tables, which must not count against the first question
