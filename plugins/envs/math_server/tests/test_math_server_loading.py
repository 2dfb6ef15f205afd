"""Which rows are trained and evaluated on, and what is said about rows and settings that are wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tinker_atropos import ConfigError, DataError, TinkerAtroposError
from tinker_atropos.validation import validate
from tinker_atropos_math_server.config import MathServerConfig
from tinker_atropos_math_server.loading import load, read_row

FIXTURE = str(Path(__file__).parent / "math_server_fixture.jsonl")


def write(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(start: int, stop: int) -> list[dict[str, str]]:
    return [{"problem": f"What is {n} squared?", "answer": str(n * n)} for n in range(start, stop)]


def rows_of(**settings: Any) -> tuple[list[int], list[int]]:
    loaded = load(validate(MathServerConfig, settings, path="env"))
    return [loaded.train[index].row for index in range(len(loaded.train))], [problem.row for problem in loaded.test]


def test_a_folder_with_train_and_test(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", numbered(0, 6))
    write(tmp_path / "test.jsonl", numbered(10, 14))
    assert rows_of(dataset=str(tmp_path)) == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3])
    loaded = load(MathServerConfig(dataset=str(tmp_path), train_rows="2:4", test_rows=":1"))
    assert [loaded.train[index].answer for index in range(len(loaded.train))] == ["4", "9"]
    assert [problem.answer for problem in loaded.test] == ["100"]


def test_of_a_folder_with_a_test_alone_a_range_is_trained_on_and_the_rest_is_the_test(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", numbered(0, 10))
    loaded = load(MathServerConfig(dataset=str(tmp_path), train_rows="4:10"))
    assert [loaded.train[index].answer for index in range(6)] == ["16", "25", "36", "49", "64", "81"]
    assert [problem.answer for problem in loaded.test] == ["0", "1", "4", "9"]
    assert [p.answer for p in load(MathServerConfig(dataset=str(tmp_path), train_rows="4:", test_rows="0:2")).test] == [
        "0",
        "1",
    ]
    with pytest.raises(DataError, match=r"has only a test split.*set env.train_rows, such as env.train_rows=100:500"):
        load(MathServerConfig(dataset=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"env.test_rows: 0:5 and env.train_rows 4:10 share rows"):
        load(MathServerConfig(dataset=str(tmp_path), train_rows="4:10", test_rows="0:5"))


def test_a_problem_has_the_number_of_its_row_in_the_split_whatever_range_is_taken(tmp_path: Path) -> None:
    write(tmp_path / "test.jsonl", numbered(0, 6))
    assert rows_of(dataset=str(tmp_path), train_rows="2:5") == ([2, 3, 4], [0, 1, 5])
    write(tmp_path / "train.jsonl", numbered(10, 16))
    assert rows_of(dataset=str(tmp_path), train_rows="2:4", test_rows="3:5") == ([2, 3], [3, 4])


def test_a_single_file_is_for_training_and_may_lend_rows_to_the_test(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", numbered(0, 6))
    assert [len(rows) for rows in rows_of(dataset=path)] == [6, 0]
    assert [len(rows) for rows in rows_of(dataset=path, train_rows="0:2")] == [2, 0]
    assert [len(rows) for rows in rows_of(dataset=path, test_rows="4:6")] == [4, 2]
    assert [len(rows) for rows in rows_of(dataset=path, train_rows="0:2", test_rows="4:6")] == [2, 2]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"problem": "p", "answer": "5"}, ("p", "5")),
        ({"question": "p", "answer": 5}, ("p", "5")),
        ({"problem": "p", "answer": "", "solution": r"so \boxed{\frac{1}{2}}"}, ("p", r"\frac{1}{2}")),
        ({"problem": "p", "solution": r"first \boxed{4}, then \boxed{5}"}, ("p", "5")),
        ({"question": "p", "answer": "3 + 2 = 5\n#### 5"}, ("p", "5")),
        ({"question": "p", "final_answer": r"\boxed{5}"}, ("p", "5")),
        ({"prompt": [{"role": "user", "content": "p"}], "ground_truth": ["5"]}, ("p", "5")),
        ({"problem": "p", "answer": 0.5}, ("p", "0.5")),
    ],
)
def test_fields_are_found(row: dict[str, Any], expected: tuple[str, str]) -> None:
    assert read_row(row, "here", None, None) == expected


def test_fields_may_be_named() -> None:
    assert read_row({"q": "p", "problem": "no", "a": "5"}, "here", "q", "a") == ("p", "5")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"problem": "p"}, r"line 2: no field with the answer.*it has 'problem'. Name it with env.answer_field"),
        ({"text": "p", "answer": "5"}, r"line 2: no field with the question, such as problem, question, prompt"),
        ({"problem": " ", "answer": "5"}, r"line 2: 'problem' must be a text"),
        ({"problem": "p", "answer": True}, r"line 2: 'answer' must be a text or a number, got True"),
        ({"problem": "p", "answer": "5" * 1001}, r"line 2: 'answer' must hold an answer of 1 to 1000 characters"),
        ({"problem": "p", "answer": r"\boxed{}"}, r"line 2: 'answer' must hold"),
        ({"problem": "p", "solution": "it is 5"}, r"line 2: 'solution' must give its answer in \\boxed\{\}"),
        ("[1]\n", r"line 2: expected an object"),
        ("{\n", r"line 2: not valid JSON"),
        ({"problem": "\ud800", "answer": "5"}, r"line 2: 'problem' holds half a surrogate pair"),
    ],
)
def test_a_wrong_row_is_named_by_file_and_line(tmp_path: Path, row: Any, said: str) -> None:
    path = write(tmp_path / "rows.jsonl", [*numbered(0, 1), row])
    with pytest.raises(DataError, match=rf"rows.jsonl, {said}"):
        load(MathServerConfig(dataset=path))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dataset": "nosuch"}, r"env.dataset: 'nosuch' is neither a file or folder here nor a hub id"),
        ({"dataset": "/nowhere/at/all"}, r"env.dataset: '/nowhere/at/all' does not exist"),
        ({"train_rows": "5"}, r"env.train_rows.*START:STOP"),
        ({"train_rows": "-5:"}, r"env.train_rows.*START:STOP"),
        ({"train_rows": "5:5"}, r"env.train_rows.*holds no row"),
        ({"train_rows": 5}, r"env.train_rows.*START:STOP"),
        ({"train_rows": "0:9"}, r"env.train_rows: 0:9 reaches beyond the 8 rows"),
        ({"train_rows": "8:"}, r"env.train_rows: 8: reaches beyond the 8 rows"),
        ({"test_rows": ":"}, r"leaves no row of .* to train on"),
        ({"question_field": "nosuch"}, r"line 1: no field 'nosuch', which question_field names"),
        ({"answer_field": "problme"}, r"line 1: no field 'problme'.*Did you mean 'problem'"),
        ({"datasets": [{"dataset": FIXTURE}]}, r"env.dataset: does not go with env.datasets"),
        ({"dataset": None, "datasets": [{"dataset": FIXTURE, "weight": 0}]}, r"weight.*greater than 0"),
        ({"dataset": None, "datasets": [{"dataset": FIXTURE, "wieght": 1}]}, r"wieght"),
        ({"dataset": None, "datasets": [{"dataset": FIXTURE}] * 2}, r"env.datasets.1: its metrics would be called"),
        (
            {"dataset": None, "datasets": [{"dataset": FIXTURE}, {"dataset": FIXTURE, "name": "b", "weight": 1}]},
            r"env.datasets.0.weight: some entries have a weight",
        ),
        (
            {"dataset": None, "datasets": [{"dataset": FIXTURE, "split": "dev"}]},
            r"env.datasets.0: .* has no split 'dev'",
        ),
        (
            {
                "dataset": None,
                "datasets": [{"dataset": FIXTURE, "weight": 1e-9}, {"dataset": FIXTURE, "name": "b", "weight": 1}],
            },
            r"at the weight of 'math_server_fixture' one pass",
        ),
        ({"eval_sets": [{"dataset": FIXTURE, "name": "a/b"}]}, r"env.eval_sets.0: 'a/b' can't name a metric"),
        (
            {"eval_sets": [{"dataset": FIXTURE}]},
            r"every problem of 'math_server_fixture' .* is in an evaluation set too",
        ),
        ({"eval_sets": [{"dataset": FIXTURE, "weight": 1.0}]}, r"env.eval_sets.0.weight"),
        ({"eval_sets": [], "test_rows": "0:1"}, r"env.test_rows: does not go with env.eval_sets"),
        ({"format_weight": -1}, r"env.format_weight"),
        ({"format_weight": "much"}, r"env.format_weight"),
        ({"length_tokens": 5}, r"env.length_tokens: 5 has no effect while env.length_weight is 0"),
        ({"few_shot": 99}, r"env.few_shot"),
        ({"prompt_format": "completion", "system_prompt": "x"}, r"env.system_prompt: a completion prompt has no"),
        ({"min_success": 0.9, "max_success": 0.1}, r"env.min_success: 0.9 must be smaller than env.max_success"),
        ({"success_window": 4}, r"env.success_window: 4 has no effect without"),
        ({"subset": "main"}, r"env.dataset: subset 'main' has no effect with a local data set"),
        ({"grading_seconds": 0}, r"env.grading_seconds"),
    ],
)
def test_a_wrong_setting_is_an_error_that_names_it(settings: dict[str, Any], said: str) -> None:
    given = {key: value for key, value in {"dataset": FIXTURE, **settings}.items() if value is not None}
    with pytest.raises(TinkerAtroposError, match=said):
        load(validate(MathServerConfig, given, path="env"))
