r"""Compares an expression with a number by math-verify, in a worker whose processor time and memory are bounded.

math-verify evaluates with sympy, which some inputs keep busy without end; its own time limit is a signal, which works
in a main thread only. The worker starts with the first expression (plain numbers never come here).
"""

from __future__ import annotations

from fractions import Fraction

from tinker_atropos.grading import Limits, WorkerPool

CPU_SECONDS = 2.0
_REMEMBERED = 4096


class Verifier:
    """One worker, started on first use and again after it was ended. One question at a time."""

    def __init__(self, *, cpu_seconds: float = CPU_SECONDS) -> None:
        self._pool: WorkerPool[list[str | int], bool] = WorkerPool(
            "tinker_atropos_gsm8k.equality:equal", workers=1, limits=Limits(cpu_seconds=cpu_seconds)
        )
        self._known: dict[tuple[str, Fraction], bool | None] = {}

    async def equal(self, expression: str, value: Fraction) -> bool | None:
        """Return whether they are equal; None if that took too long. Raises `RunError` without math-verify."""
        key = (expression, value)
        if key not in self._known:
            answer = await self._pool.call([expression, value.numerator, value.denominator])
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            self._known[key] = answer
        return self._known[key]

    async def close(self) -> None:
        """End the worker; a later question starts a new one."""
        await self._pool.close()
