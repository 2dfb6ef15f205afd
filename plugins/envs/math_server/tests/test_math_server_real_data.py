"""MATH-500: every gold against equivalent forms and near misses made of it by rules, beside math-verify's own verdict.

Needs TINKER_ATROPOS_TEST_DATA.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tinker_atropos import Completion, TaskRef
from tinker_atropos.grading import Limits, WorkerPool
from tinker_atropos_math_server.boxed import last_box
from tinker_atropos_math_server.config import MathServerConfig
from tinker_atropos_math_server.environment import make
from tinker_atropos_math_server.grading import Grader

pytestmark = pytest.mark.data

ROOT = os.environ.get("TINKER_ATROPOS_TEST_DATA")

INTEGER = r"-?\d+"
FRACTION = r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}"


def folder(name: str) -> Path:
    if not ROOT or not (Path(ROOT) / name).is_dir():
        pytest.skip(f"TINKER_ATROPOS_TEST_DATA names no folder with {name}/")
    return Path(ROOT) / name


def rows() -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder("math500") / "test.jsonl").read_text("utf-8").splitlines()]


def last_number_raised(text: str) -> str | None:
    """Return the text with its last number one higher; None without one."""
    found = list(re.finditer(r"\d+", text))
    if not found:
        return None
    match = found[-1]
    return f"{text[: match.start()]}{int(match[0]) + 1}{text[match.end() :]}"


def negated(text: str) -> str | None:
    return None if text in ("0", "\\pi") or not re.fullmatch(r"[\d.]+|\\d?frac\{\d+\}\{\d+\}", text) else f"-{text}"


# Rules that make another spelling of an answer, or None where they do not apply. Written without the code under test.
SAME: dict[str, Callable[[str], str | None]] = {
    "spaces": lambda text: f"  {text} ",
    "dollars": lambda text: f"${text}$" if "$" not in text else None,
    "display fractions": lambda text: text.replace("\\frac", "\\dfrac") if "\\frac" in text else None,
    "a slash": lambda text: f"{m[1]}{m[2]}/{m[3]}" if (m := re.fullmatch(FRACTION, text)) else None,
    "not in lowest terms": lambda text: (
        f"{m[1]}\\frac{{{3 * int(m[2])}}}{{{3 * int(m[3])}}}" if (m := re.fullmatch(FRACTION, text)) else None
    ),
    "a sum": lambda text: f"{int(text) - 3} + 3" if re.fullmatch(INTEGER, text) else None,
    "a quotient": lambda text: f"\\frac{{{2 * int(text)}}}{{2}}" if re.fullmatch(INTEGER, text) else None,
    "a decimal": lambda text: f"{text}.00" if re.fullmatch(INTEGER, text) else None,
    "a name": lambda text: f"n = {text}" if re.fullmatch(INTEGER + "|" + FRACTION, text) else None,
    "bigger brackets": lambda text: (
        "\\left" + text[:-1] + "\\right" + text[-1] if re.fullmatch(r"[(\[][^()\[\]]*[)\]]", text) else None
    ),
    "short roots": lambda text: (
        re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", text) if re.search(r"\\sqrt\{\d\}", text) else None
    ),
    "a unicode minus": lambda text: text.replace("-", "−") if "-" in text else None,
    "times one": lambda text: f"1 \\cdot {text}" if re.fullmatch(r"\d*\s*\\sqrt\{\d+\}|\d*\s*\\pi", text) else None,
    "a period": lambda text: f"{text}.",
}
OTHER: dict[str, Callable[[str], str | None]] = {
    "the last number raised": last_number_raised,
    "negated": negated,
    "a digit more": lambda text: f"{text}1" if re.fullmatch(INTEGER, text) else None,
    "upside down": lambda text: (
        f"{m[1]}\\frac{{{m[3]}}}{{{m[2]}}}" if (m := re.fullmatch(FRACTION, text)) and m[2] != m[3] else None
    ),
    "two answers": lambda text: f"{text}, {int(text) + 1}" if re.fullmatch(INTEGER, text) else None,
    "one or the other": lambda text: f"{text} \\text{{ or }} {int(text) + 1}" if re.fullmatch(INTEGER, text) else None,
    "a little more": lambda text: f"{text}.01" if re.fullmatch(INTEGER, text) else None,
    "closed brackets": lambda text: (
        f"[{text[1:-1]}]" if (m := re.fullmatch(r"\((-?\d+),(-?\d+)\)", text)) and int(m[1]) < int(m[2]) else None
    ),
    "a letter": lambda text: "x" if re.fullmatch(INTEGER, text) else None,
}


def pairs() -> list[tuple[str, str, str, bool]]:
    """Return (gold, given, rule, whether they are the same)."""
    made = []
    for place, row in enumerate(rows()):
        for expected, rules in ((True, SAME), (False, OTHER)):
            applying = [(name, given) for name, rule in rules.items() if (given := rule(row["answer"])) is not None]
            # Two rules a row in turn, so that every rule meets answers of many kinds and the test stays short.
            for shift in range(min(2, len(applying))):
                name, given = applying[(place + shift * 5) % len(applying)]
                made.append((row["answer"], given, name, expected))
    return list(dict.fromkeys(made))


async def test_rewritten_golds_are_right_and_altered_ones_wrong(record_property: Callable[[str, object], None]) -> None:
    made = pairs()
    grader = Grader(workers=None, limits=Limits())
    reference: WorkerPool[list[str], bool] = WorkerPool("tinker_atropos_math_server.equality:reference")
    longest = 0.0

    async def verdict(gold: str, given: str) -> bool | None:
        nonlocal longest
        began = time.monotonic()
        right = (await grader.grade(gold, given)).right
        longest = max(longest, time.monotonic() - began)
        return right

    try:
        ours = await asyncio.gather(*(verdict(gold, given) for gold, given, _, _ in made))
        theirs = await asyncio.gather(*(reference.call([gold, given.strip()]) for gold, given, _, _ in made))
    finally:
        await grader.close()
        await reference.close()
    wrong = [(pair, right) for pair, right in zip(made, ours, strict=True) if right is not pair[3]]
    agreeing = sum(bool(one) == bool(other) for one, other in zip(ours, theirs, strict=True))
    astray = sum(bool(right) != pair[3] for pair, right in zip(made, theirs, strict=True))
    report = (
        f"{len(made)} pairs, {sum(pair[3] for pair in made)} of them equivalent: all but {len(wrong)} judged right; "
        f"math-verify alone agrees on {agreeing} ({agreeing / len(made):.1%}) and errs on {astray}; "
        f"longest with all waiting at once {longest:.1f} s"
    )
    print(report)
    record_property("agreement", report)
    assert len(made) >= 300
    assert not wrong, wrong[:20]


def alike(row: dict[str, str], other: dict[str, str]) -> bool:
    return row["answer"].removeprefix("x=") == other["answer"].removeprefix("x=")


async def test_the_boxed_solutions_of_the_data_are_right() -> None:
    environment = make(MathServerConfig(dataset=str(folder("math500")), train_rows="100:500", format_weight=0.5))
    assert (environment.tasks("train"), environment.tasks("test")) == (400, 100)
    given = rows()
    try:
        for split, first in (("train", 100), ("test", 0)):
            for index in range(environment.tasks(split)):
                row = given[first + index]
                problem = environment.problem(TaskRef(split, index, 0))
                assert (problem.question, problem.answer) == (row["problem"], row["answer"])
                assert last_box(row["solution"]) is not None
                step = await environment.score(Completion(row["solution"]), problem)
                assert step.metrics["correct"] == 1.0, (row["answer"], row["solution"][-80:])
                # The question, echoed, and the solution of another problem earn nothing.
                other = given[(first + index + 1) % 500]
                for text in (row["problem"], f"\\boxed{{{row['problem']}}}", other["solution"]):
                    earned = (await environment.score(Completion(text), problem)).metrics["correct"]
                    assert earned == 0.0 or (text == other["solution"] and alike(row, other)), text[:80]
    finally:
        await environment.close()
