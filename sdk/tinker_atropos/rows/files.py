"""Reads rows from local JSON lines and Parquet, strictly: what is wrong is named by file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tinker_atropos.errors import DataError

JSON_LINES = (".jsonl", ".jsonl.gz", ".json")
SUFFIXES = (*JSON_LINES, ".parquet")
FOLDERS = ("", "main", "data")  # where a folder, or a hub repository's copy, keeps its splits


def split_files(dataset: str, setting: str = "env.dataset") -> dict[str, list[Path]]:
    """Return the files of `train` and `test` in a folder, or the one file that `dataset` is, by split.

    A single file is for training, unless its name says otherwise. `setting` is what named it, for the errors.
    Raises `DataError` for a path that holds no data.
    """
    try:
        path = Path(dataset).expanduser()
        there = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # no such user for `~name`, a null byte, a name too long
        raise DataError(f"{setting}: {dataset[:80]!r} is no path: {error}") from None
    if path.is_dir():
        return _folder_files(path, setting)
    if not there:
        raise DataError(
            f"{setting}: {dataset!r} does not exist; give a folder with train.jsonl and test.jsonl, or a JSONL file"
        )
    if not path.name.lower().endswith(SUFFIXES):
        raise DataError(f"{setting}: {dataset!r} is no data file; expected {', '.join(SUFFIXES)} or a folder of them")
    split = "test" if path.name.lower().split(".")[0].split("-")[0] == "test" else "train"
    return {split: [path]}


def read_rows(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
    """Yield where each row stands (`FILE, line 7`) and the row; raises `DataError` for what can't be read."""
    if path.is_dir():
        raise DataError(f"{path} is a folder, expected a data file")
    yield from _parquet_rows(path) if path.name.lower().endswith(".parquet") else _json_lines(path, expected)


def _folder_files(folder: Path, setting: str) -> dict[str, list[Path]]:
    found = {split: files for split in ("train", "test") if (files := _files(folder, split))}
    if not found:
        holds = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise DataError(
            f"{setting}: folder {str(folder)!r} has neither train nor test; expected train.jsonl and test.jsonl (or "
            f"train-*.parquet and the like, also in main/ or data/), it holds {holds}"
        )
    return found


def _files(folder: Path, split: str) -> list[Path]:
    """Return the files of a split: the first place and kind that has any."""
    for place in FOLDERS:
        for suffix in SUFFIXES:
            whole = folder / place / f"{split}{suffix}"
            files = [whole] if whole.exists() else sorted((folder / place).glob(f"{split}-*{suffix}"))
            if files:
                return files
    return []


def _json_lines(path: Path, expected: str) -> Iterator[tuple[str, Any]]:
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
                f"{where}: not valid JSON ({error.msg} at column {error.colno}); expected {expected}, got {text:.60}"
            ) from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: JSON that can't be read ({error}); expected {expected}") from None
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
