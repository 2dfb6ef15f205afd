"""Graded answers per second: math_server's workers beside math-verify called in a loop, and the whole grader.

    python benchmarks/grading.py [--answers 600] [--workers N] [--rounds 3]

One process calls math-verify on (gold, answer) pairs one after the other, without any time limit: the loop. The pool
gets the same pairs with the time and memory limits on, every pair through a worker; its target is 0.9 of cores x loop.
The grader is what a run has: it settles plain answers itself and remembers verdicts. The median of the rounds counts.
Processor time an answer, the parent's share included, is shown beside: on a machine that is busy otherwise it says what
the rates would be on one that is not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import sys
import time
from pathlib import Path

from tinker_atropos.grading import Limits, WorkerPool
from tinker_atropos.grading.pool import available_cores
from tinker_atropos_math_server.grading import Grader

TARGET = 0.9


def questions(count: int, seed: int) -> list[list[str]]:
    """Pairs of every kind of answer, half of them right, none twice."""
    rng = random.Random(seed)

    def one() -> tuple[str, str, str]:
        a, b, c, d = (rng.randint(2, 97) for _ in range(4))
        return rng.choice(
            [
                (f"{a * b}", f"{a} \\cdot {b}", f"{a} \\cdot {b} + 1"),
                (f"\\frac{{{a}}}{{{b}}}", f"\\frac{{{a * c}}}{{{b * c}}}", f"\\frac{{{a * c + 1}}}{{{b * c}}}"),
                (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}", f"\\sqrt{{{a * a * b + 1}}}"),
                (f"({a},{a + b}]", f"\\left({a}, {a + b}\\right]", f"[{a}, {a + b}]"),
                (f"{a}, {a + b}", f"\\{{{a + b}, {a}\\}}", f"\\{{{a + b}, {a + 1}\\}}"),
                (f"({a}, {b}, {c})", f"\\left( {a}, {b}, {2 * c}/2 \\right)", f"({b + 1}, {a}, {c})"),
                (f"{a}x + {b}", f"{b} + {a}x", f"{b}x + {a + 1}"),
                (f"x^2 + {a + b}x + {a * b}", f"(x+{a})(x+{b})", f"(x+{a})(x+{b + 1})"),
                (
                    f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {d} \\end{{pmatrix}}",
                    f"\\begin{{bmatrix}} {a} & {b} \\\\ {c} & {2 * d}/2 \\end{{bmatrix}}",
                    f"\\begin{{pmatrix}} {a} & {b} \\\\ {c} & {d + 1} \\end{{pmatrix}}",
                ),
                (f"y = {a}x + {b}", f"y = {b} + {a}x", f"y = {a}x - {b}"),
            ]
        )

    found: dict[tuple[str, str], None] = {}
    while len(found) < count:
        gold, same, other = one()
        found[(gold, same if len(found) % 2 else other)] = None
    return [list(pair) for pair in found]


def loop(pairs: list[list[str]]) -> float:
    """Return answers per second of math-verify called in this process."""
    from tinker_atropos_math_server.equality import reference

    began = time.perf_counter()
    for pair in pairs:
        reference(pair)
    return len(pairs) / (time.perf_counter() - began)


def used() -> float:
    """Return the processor seconds of this process and of its children that live (Linux)."""
    total = time.process_time()
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


async def pooled(pool: WorkerPool[list[str], bool], pairs: list[list[str]]) -> float:
    began = time.perf_counter()
    answers = await asyncio.gather(*(pool.call(pair) for pair in pairs))
    taken = time.perf_counter() - began
    assert None not in answers, "a plain pair hit the limits"
    return len(pairs) / taken


async def graded(grader: Grader, pairs: list[list[str]]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(grader.grade(gold, answer) for gold, answer in pairs))
    return len(pairs) / (time.perf_counter() - began)


async def measure(answers: int, workers: int, rounds: int) -> int:
    pool: WorkerPool[list[str], bool] = WorkerPool("tinker_atropos_math_server.equality:reference", workers=workers)
    grader = Grader(workers=workers, limits=Limits())
    rates: dict[str, list[float]] = {"loop": [], "pool": [], "grader": []}
    seconds: dict[str, list[float]] = {"loop": [], "pool": [], "grader": []}
    try:
        warm = questions(40, seed=-1)
        loop(warm)
        await asyncio.gather(pooled(pool, warm), graded(grader, warm))
        for number in range(rounds):
            # Other pairs in each round, the same for all three: sympy and the grader remember what they have seen.
            pairs = questions(answers, seed=number)
            marks = [used()]
            rates["loop"].append(loop(pairs))
            marks.append(used())
            rates["pool"].append(await pooled(pool, pairs))
            marks.append(used())
            rates["grader"].append(await graded(grader, pairs))
            marks.append(used())
            for name, before, after in zip(seconds, marks, marks[1:], strict=False):
                seconds[name].append((after - before) / answers)
    finally:
        await pool.close()
        await grader.close()
    peer = statistics.median(rates["loop"])
    reached = statistics.median(
        fast / (workers * slow) for fast, slow in zip(rates["pool"], rates["loop"], strict=True)
    )
    print(f"graded answers/s, median of {rounds} rounds of {answers}; {workers} workers, {available_cores()} cores")
    for name, text in (
        ("loop", "math-verify in a loop, no time limit"),
        ("pool", "the same by the workers, limits on"),
        ("grader", "math_server's grader"),
    ):
        rate = statistics.median(rates[name])
        milliseconds = 1000 * statistics.median(seconds[name])
        print(
            f"  {text:<40} {rate:8.1f}   {rate / peer:5.2f} x the loop   {milliseconds:6.1f} ms of a core an answer   "
            f"rounds {[round(r, 1) for r in rates[name]]}"
        )
    # On a machine that others use as well the workers do not get a core each, and the rates say little of the pool.
    got = statistics.median(rate * cost for rate, cost in zip(rates["pool"], seconds["pool"], strict=True))
    per_core = statistics.median(slow / fast for slow, fast in zip(seconds["loop"], seconds["pool"], strict=True))
    starved = got < TARGET * min(workers, available_cores())
    verdict = "reached" if reached >= TARGET else "not measurable on a busy machine" if starved else "MISSED"
    print(f"pool / (workers x loop) = {reached:.2f}, target {TARGET}: {verdict}")
    print(f"the workers got {got:.2f} cores; per core used the pool grades {per_core:.2f} x the loop")
    return 0 if reached >= TARGET or (starved and per_core >= TARGET) else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=600)
    parser.add_argument("--workers", type=int, default=available_cores())
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    sys.exit(asyncio.run(measure(given.answers, given.workers, given.rounds)))


if __name__ == "__main__":
    main()
