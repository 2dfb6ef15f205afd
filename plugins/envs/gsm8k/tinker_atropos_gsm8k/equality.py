r"""What a grading worker runs: math-verify on an expression and a number. Imported in workers only: it loads sympy."""

from __future__ import annotations

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Rational


def equal(question: list[str | int]) -> bool:
    """Return whether `[expression, numerator, denominator]` are equal."""
    expression, numerator, denominator = question
    try:
        parsed = parse(
            f"\\boxed{{{expression}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None
        )
        return bool(parsed) and bool(verify(Rational(numerator, denominator), parsed[0], timeout_seconds=None))
    except (Exception, RecursionError, MemoryError):
        return False


equal([r"\frac{1}{2}", 1, 2])  # builds the parser's tables, which must not count against the first question
