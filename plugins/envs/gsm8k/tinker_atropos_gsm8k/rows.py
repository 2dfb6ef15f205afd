"""Turns rows of local files into problems, strictly: a row that is wrong is named by file and line."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from tinker_atropos.errors import DataError
from tinker_atropos.rows.files import read_rows, split_files

from tinker_atropos_gsm8k.grading import number
from tinker_atropos_gsm8k.problems import Problem

SPLITS = ("train", "test")

_EXPECTED = '{"question": "…", "answer": "… #### 18"}'


def read_path(dataset: str) -> dict[str, list[Problem]]:
    """Return the problems of a folder or file by split; raises `DataError` with the file and line at fault."""
    return {
        split: [problem for file in files for problem in _read_file(file)]
        for split, files in split_files(dataset).items()
    }


def to_problem(row: Any, where: str) -> Problem:
    """Return the problem of a row `{"question", "answer"}`; raises `DataError` that begins with `where`."""
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object like {_EXPECTED}, got {type(row).__name__} {row!r:.60}")
    missing = [key for key in ("question", "answer") if row.get(key) is None]
    if missing:
        raise DataError(
            f"{where}: {' and '.join(map(repr, missing))} missing; expected {_EXPECTED}, got the keys "
            f"{', '.join(map(repr, row)) or 'none'}"
        )
    question = row["question"]
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: 'question' must be a text, got {question!r:.60}")
    try:
        question.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"{where}: 'question' holds half a surrogate pair, which is no text; got {question!r:.60}"
        ) from None
    return Problem(question, _gold(row["answer"], where))


def _gold(answer: Any, where: str) -> Fraction:
    if isinstance(answer, (int, float)) and not isinstance(answer, bool):
        text = repr(answer) if isinstance(answer, float) else format(answer, "d") if abs(answer) < 10**40 else "huge"
    elif isinstance(answer, str):
        text = answer.rpartition("####")[2].strip()
    else:
        raise DataError(f"{where}: 'answer' must be a text or a number, got {answer!r:.60}")
    value = number(text)
    if value is None:
        what = "its solution and `#### 18`" if "####" not in str(answer)[:100_000] else "a number after `####`"
        raise DataError(f"{where}: 'answer' must end with {what}, or be a bare number; got {str(answer)[-60:]!r}")
    return value


def _read_file(path: Path) -> list[Problem]:
    problems = [to_problem(row, where) for where, row in read_rows(path, _EXPECTED)]
    if not problems:
        raise DataError(f"{path} is empty; expected one problem a line, like {_EXPECTED}")
    return problems
