r"""Turns a problem into what the policy is shown: chat messages or raw text, with worked examples before it."""

from __future__ import annotations

from tinker_atropos.worked_examples import WorkedExamples

INSTRUCTION = r"Reason step by step. Give the final answer, and nothing but it, in \boxed{}."

MAX_TOKENS = 2048  # new tokens for a worked solution

# Where a continued text would begin a problem of its own.
COMPLETION_STOP = ("\n\nProblem:",)

# Written for this project, so that no problem of any data set is spent on an example.
EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        r"How many positive divisors of $720$ are perfect squares?",
        r"We have $720 = 2^4 \cdot 3^2 \cdot 5$. A divisor that is a square takes an even power of each prime: "
        r"$2^0, 2^2$ or $2^4$, then $3^0$ or $3^2$, and $5^0$. That makes $3 \cdot 2 = 6$. The answer is $\boxed{6}$.",
    ),
    (
        r"A fair die is thrown three times. What is the probability that the three numbers are all different?",
        r"There are $6 \cdot 5 \cdot 4 = 120$ ways for different numbers among $6^3 = 216$. The probability is "
        r"$\frac{120}{216} = \frac{5}{9}$. The answer is $\boxed{\frac{5}{9}}$.",
    ),
    (
        r"Find all real $x$ with $x^2 - 6x + 4 \le 0$.",
        r"The roots of $x^2 - 6x + 4$ are $3 \pm \sqrt{5}$, and it opens upwards, so it is not positive between them. "
        r"The answer is $\boxed{[3 - \sqrt{5}, 3 + \sqrt{5}]}$.",
    ),
    (
        r"Let $M = \begin{pmatrix} 1 & 2 \\ 0 & 1 \end{pmatrix}$. Compute $M^3$.",
        r"Each factor adds $2$ to the upper right entry: $M^3 = \begin{pmatrix} 1 & 6 \\ 0 & 1 \end{pmatrix}$. The "
        r"answer is $\boxed{\begin{pmatrix} 1 & 6 \\ 0 & 1 \end{pmatrix}}$.",
    ),
)

SHOWN = WorkedExamples(EXAMPLES, "Problem", "Solution")
