"""Local data: every layout that is read, and every way a file can be wrong, named by file and line."""

from __future__ import annotations

import gzip
import json
import shutil
from fractions import Fraction
from pathlib import Path

import pytest
from tinker_atropos import DataError
from tinker_atropos_gsm8k.rows import read_path

FIXTURE = Path(__file__).parent / "gsm8k_fixture.jsonl"
ANSWERS = [Fraction(text) for text in ("79", "45", "1400", "-8", "25/2", "240", "24", "1290")]
GOOD = '{"question": "What is 3 + 4?", "answer": "3 + 4 = 7\\n#### 7"}'


def answers(path: Path, split: str) -> list[Fraction]:
    return [problem.answer for problem in read_path(str(path))[split]]


@pytest.mark.parametrize("name", ["train.jsonl", "main/train.jsonl", "data/train-00000-of-00001.jsonl", "train.json"])
def test_a_folder_holds_its_splits_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    shutil.copy(FIXTURE, tmp_path / name)
    assert list(read_path(str(tmp_path))) == ["train"]
    assert answers(tmp_path, "train") == ANSWERS


def test_a_compressed_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl.gz").write_bytes(gzip.compress(FIXTURE.read_bytes()))
    assert answers(tmp_path, "test") == ANSWERS


@pytest.mark.parametrize("pattern", ["main/{}-00000-of-00001.parquet", "data/{}-00000-of-00001.parquet", "{}.parquet"])
def test_a_copy_of_a_hub_repository_is_read(tmp_path: Path, pattern: str) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in FIXTURE.read_text().splitlines()]
    for split, part in (("train", rows), ("test", rows[:3])):
        file = tmp_path / pattern.format(split)
        file.parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), file)
    assert answers(tmp_path, "train") == ANSWERS
    assert answers(tmp_path, "test") == ANSWERS[:3]


@pytest.mark.parametrize(
    ("name", "split"), [("mine.jsonl", "train"), ("test.jsonl", "test"), ("test-2024.jsonl", "test")]
)
def test_a_single_file_is_for_training_unless_it_is_called_test(tmp_path: Path, name: str, split: str) -> None:
    shutil.copy(FIXTURE, tmp_path / name)
    assert list(read_path(str(tmp_path / name))) == [split]


@pytest.mark.parametrize(
    ("answer", "value"),
    [('"18"', "18"), ("18", "18"), ("-2.5", "-5/2"), ('"so it is $1,080"', None), ('"$1,080"', "1080")],
)
def test_an_answer_may_be_a_bare_number(tmp_path: Path, answer: str, value: str | None) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f'{{"question": "?", "answer": {answer}}}\n')
    if value is None:
        with pytest.raises(DataError, match="'answer' must end with"):
            read_path(str(file))
    else:
        assert answers(file, "train") == [Fraction(value)]


def test_blank_lines_and_a_byte_order_mark_are_skipped_but_counted(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text(f"\ufeff{GOOD}\n\n{GOOD}\n{{\n")
    with pytest.raises(DataError, match=r"train\.jsonl, line 4: not valid JSON"):
        read_path(str(file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"', "not valid JSON"),
        ("no json at all", "not valid JSON"),
        ("[1, 2]", "expected an object .* got list"),
        ("null", "expected an object .* got NoneType"),
        ('{"problem": "x", "answer": "#### 1"}', "'question' missing; .* got the keys 'problem', 'answer'"),
        ('{"question": "x"}', "'answer' missing"),
        ("{}", "'question' and 'answer' missing"),
        ('{"question": "", "answer": "#### 1"}', "'question' must be a text"),
        ('{"question": 5, "answer": "#### 1"}', "'question' must be a text, got 5"),
        ('{"question": "\\ud800", "answer": "#### 1"}', "surrogate"),
        ('{"question": "x", "answer": "it is seven"}', "must end with its solution and `#### 18`"),
        ('{"question": "x", "answer": "#### seven"}', "must end with a number after `####`"),
        ('{"question": "x", "answer": "7 ####"}', "must end with a number after `####`"),
        ('{"question": "x", "answer": true}', "'answer' must be a text or a number, got True"),
        ('{"question": "x", "answer": [7]}', "'answer' must be a text or a number"),
        ('{"question": "x", "answer": NaN}', "must end with"),
        ('{"question": "x", "answer": 1e999}', "must end with"),
        ('{"question": "x", "answer": ' + "9" * 100 + "}", "must end with"),
        ('{"question": "x", "answer": ' + "9" * 5000 + "}", "JSON that can't be read"),
        ("[" * 100_000, "JSON that can't be read"),
    ],
)
def test_a_wrong_line_is_named_by_file_and_number(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "train.jsonl").write_text(f"{GOOD}\n{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(DataError, match=rf"train\.jsonl, line 3: .*{message}"):
        read_path(str(tmp_path))


def test_a_wrong_row_of_a_parquet_file_is_named(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"question": "?", "answer": "#### 1"}, {"question": "?", "answer": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    with pytest.raises(DataError, match=r"train\.parquet, row 2: 'answer' missing"):
        read_path(str(tmp_path))


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_bytes(GOOD.encode() + b'\n{"question": "caf\xe9", "answer": "#### 1"}\n')
    with pytest.raises(DataError, match=r"test\.jsonl, line 2: not UTF-8"):
        read_path(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.jsonl", b"", "train.jsonl is empty"),
        ("train.jsonl", b"\n \n", "train.jsonl is empty"),
        ("train.parquet", b"PAR1 but no more", "can't be read as Parquet"),
        ("train.jsonl.gz", b"not gzip", "can't be read"),
        ("train.jsonl.gz", gzip.compress(b"x" * 1000)[:-12], "can't be read|line 1"),
        ("notes.txt", b"hello", "has neither train nor test; .* it holds notes.txt"),
    ],
)
def test_a_folder_with_a_useless_file_says_so(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_path(str(tmp_path))


def test_a_folder_where_a_file_should_be_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").mkdir()
    with pytest.raises(DataError, match=r"train\.jsonl is a folder"):
        read_path(str(tmp_path))


@pytest.mark.parametrize("name", ["nothing.jsonl", "no/such/folder", "~nobody-of-that-name/x", "x\0y", "y" * 5000])
def test_a_path_that_is_none_says_so(name: str) -> None:
    with pytest.raises(DataError, match=r"env\.dataset: .* (does not exist|is no path)"):
        read_path(name)


def test_a_file_of_another_kind_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("question,answer\n")
    with pytest.raises(DataError, match=r"is no data file; expected \.jsonl"):
        read_path(str(tmp_path / "train.csv"))
