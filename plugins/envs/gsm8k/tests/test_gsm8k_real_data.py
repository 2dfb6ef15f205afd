"""Every answer of GSM8K itself, and the numbers among MATH-500's boxed solutions. Needs TINKER_ATROPOS_TEST_DATA."""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator
from fractions import Fraction
from pathlib import Path

import pytest
from tinker_atropos import Completion, TaskRef
from tinker_atropos_gsm8k.config import Gsm8kConfig
from tinker_atropos_gsm8k.environment import Gsm8kEnvironment, make
from tinker_atropos_gsm8k.grading import final_answer
from tinker_atropos_gsm8k.problems import Problem

pytestmark = pytest.mark.data

ROOT = os.environ.get("TINKER_ATROPOS_TEST_DATA")


def folder(name: str) -> Path:
    if not ROOT or not (Path(ROOT) / name).is_dir():
        pytest.skip(f"TINKER_ATROPOS_TEST_DATA names no folder with {name}/")
    return Path(ROOT) / name


def plain_gold(answer: str) -> Fraction | None:
    """Return the value of an integer, a decimal or a LaTeX fraction, read without the code under test; else None."""
    match = re.fullmatch(
        r"(-?)(?:\\frac\{(\d+)\}\{(\d+)\}|((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?))", answer.replace("\\!", "")
    )
    if match is None:
        return None
    minus, above, below, plain = match.groups()
    value = Fraction(int(above), int(below)) if above else Fraction(plain.replace(",", ""))
    return -value if minus else value


@pytest.fixture
async def environment() -> AsyncIterator[Gsm8kEnvironment]:
    made = make(Gsm8kConfig(dataset=str(folder("gsm8k"))))
    yield made
    await made.close()


@pytest.mark.parametrize(("split", "rows"), [("train", 7473), ("test", 1319)])
async def test_every_gold_answer_is_right_in_each_form_and_wrong_when_altered(
    environment: Gsm8kEnvironment, split: str, rows: int
) -> None:
    lines = (folder("gsm8k") / f"{split}.jsonl").read_text("utf-8").splitlines()
    assert environment.tasks(split) == len(lines) == rows
    for index, line in enumerate(lines):
        solution = json.loads(line)["answer"]
        gold = solution.rpartition("#### ")[2]
        problem = (await environment.episode(TaskRef(split, index, 0))).problem
        plain = problem.answer
        altered = f"{plain + 1}"
        right = [
            solution,
            f"#### {gold}",
            f"\\boxed{{{gold}}}",
            f"It is ${gold}.",
            f"#### {plain}.0",
            f"\\boxed{{{2 * plain}/2}}",
        ]
        wrong = [
            f"#### {altered}",
            f"\\boxed{{{altered}}}",
            f"#### {gold}\n#### {altered}",
            f"#### {gold}7",
            f"#### {plain}.5",
        ]
        if plain:
            wrong.append(f"#### -{gold}" if plain > 0 else f"#### {-plain}")
        for text, reward in [*((text, 1.0) for text in right), *((text, 0.0) for text in wrong)]:
            assert (await environment.score(Completion(text), problem)).reward == reward, (split, index, text[-80:])


async def test_boxed_solutions_of_math500_with_a_number_as_answer_are_right(environment: Gsm8kEnvironment) -> None:
    checked = 0
    for line in (folder("math500") / "test.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        gold = plain_gold(row["answer"])
        if gold is None:
            continue
        step = await environment.score(Completion(row["solution"]), Problem("?", gold))
        assert step.reward == 1.0, (row["unique_id"], row["answer"], final_answer(row["solution"]))
        step = await environment.score(Completion(row["solution"]), Problem("?", gold + Fraction(1, 7)))
        assert step.reward == 0.0
        checked += 1
    assert checked == 366
