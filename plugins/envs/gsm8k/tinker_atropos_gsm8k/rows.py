"""Reads problems from local files, strictly: a row that is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from tinker_atropos.errors import DataError

from tinker_atropos_gsm8k.grading import number
from tinker_atropos_gsm8k.problems import Problem

SPLITS = ("train", "test")

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json")
_SUFFIXES = (*_JSON_LINES, ".parquet")
_FOLDERS = ("", "main", "data")  # where a folder, or a hub repository's copy, keeps its splits
_EXPECTED = '{"question": "…", "answer": "… #### 18"}'


def read_path(dataset: str) -> dict[str, list[Problem]]:
    """Return the problems of a folder or file by split; raises `DataError` with the file and line at fault."""
    try:
        path = Path(dataset).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user for `~name`, a null byte, a name too long
        raise DataError(f"env.dataset: {dataset[:80]!r} is no path: {error}") from None
    if path.is_dir():
        return _read_folder(path)
    if not there:
        raise DataError(
            f"env.dataset: {dataset!r} does not exist; give a folder with train.jsonl and test.jsonl, or a JSONL file"
        )
    if not path.name.lower().endswith(_SUFFIXES):
        raise DataError(
            f"env.dataset: {dataset!r} is no data file; expected {', '.join(_SUFFIXES)} or a folder of them"
        )
    # A single file is for training, unless its name says otherwise.
    split = "test" if path.name.lower().split(".")[0].split("-")[0] == "test" else "train"
    return {split: _read_file(path)}


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


def _read_folder(folder: Path) -> dict[str, list[Problem]]:
    found: dict[str, list[Problem]] = {}
    for split in SPLITS:
        files = _split_files(folder, split)
        if files:
            found[split] = [problem for file in files for problem in _read_file(file)]
    if not found:
        holds = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"env.dataset: folder {str(folder)!r} has neither train nor test; expected train.jsonl and test.jsonl (or "
            f"train-*.parquet and the like, also in main/ or data/), it holds {holds}"
        )
    return found


def _split_files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split: the first place and kind that has any."""
    for place in _FOLDERS:
        for suffix in _SUFFIXES:
            whole = folder / place / f"{split}{suffix}"
            files = [whole] if whole.exists() else sorted((folder / place).glob(f"{split}-*{suffix}"))
            if files:
                return files
    return []


def _read_file(path: Path) -> list[Problem]:
    if path.is_dir():
        raise DataError(f"{path} is a folder, expected a data file")
    rows = _parquet_rows(path) if path.name.lower().endswith(".parquet") else _json_lines(path)
    problems = [to_problem(row, where) for where, row in rows]
    if not problems:
        raise DataError(f"{path} is empty; expected one problem a line, like {_EXPECTED}")
    return problems


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for line_number, line in enumerate(_lines(path), start=1):
        where = f"{path}, line {line_number}"
        try:
            text = line.decode("utf-8-sig" if line_number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save the file as UTF-8"
            ) from None
        if not text:
            continue
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected {_EXPECTED}, got {text:.60}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: JSON that can't be read ({error}); expected {_EXPECTED}") from None
        yield where, row


def _lines(path: Path) -> Iterable[bytes]:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (OSError, EOFError) as error:
        raise DataError(f"{path} can't be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} can't be read as Parquet: {str(error).splitlines()[0]}") from error
    for row_number, row in enumerate(table.to_pylist(), start=1):
        yield f"{path}, row {row_number}", row
