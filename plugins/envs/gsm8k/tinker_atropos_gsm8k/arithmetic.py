"""Sums `a + b` of 1 to 20, held out by unordered pair so that `b + a` never gives a test problem away."""

from __future__ import annotations

import random
from fractions import Fraction

from tinker_atropos_gsm8k.problems import FixedSource, Problem

HIGHEST = 20
HELD_OUT = 200
MAX_TOKENS = 4  # a sum has two digits at most; the rest is for a space before it and the line break after it
STOP = ("\n",)

# Shown in this order; none of them, in either order, is ever a test problem.
SHOTS = ((3, 4), (12, 5), (8, 11), (15, 2))
MAX_SHOTS = len(SHOTS)

# Fixed: which problems are held out must not depend on the seed of a run.
_SPLIT_SEED = 20


def pairs() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the ordered pairs (a, b) of train and of test, 200 each; no two of one sum of terms in both."""
    rng = random.Random(_SPLIT_SEED)
    shown = {tuple(sorted(pair)) for pair in SHOTS}
    numbers = range(1, HIGHEST + 1)
    doubles = [(a, a) for a in numbers]
    mixed = [(a, b) for a in numbers for b in numbers if a < b and (a, b) not in shown]
    # Half of the 20 doubles and 95 of the 190 unordered mixed pairs, in both orders: 10 + 190 = 200.
    held_doubles = rng.sample(doubles, HIGHEST // 2)
    held_mixed = rng.sample(mixed, (HELD_OUT - HIGHEST // 2) // 2)
    test = held_doubles + [pair for a, b in held_mixed for pair in ((a, b), (b, a))]
    held = set(test)
    train = [(a, b) for a in numbers for b in numbers if (a, b) not in held]
    rng.shuffle(test)
    rng.shuffle(train)
    return train, test


def source() -> FixedSource:
    """Return the problems; a question is the bare sum, `7 + 5`."""
    return FixedSource(
        {
            split: [Problem(f"{a} + {b}", Fraction(a + b)) for a, b in chosen]
            for split, chosen in zip(("train", "test"), pairs(), strict=True)
        }
    )


def prompt(question: str, shots: int) -> str:
    """Return the raw text to continue: solved sums, one a line, then `question =`."""
    solved = "".join(f"{a} + {b} = {a + b}\n" for a, b in SHOTS[:shots])
    return f"{solved}{question} ="
