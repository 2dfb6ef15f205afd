"""Loads the problems to train and to evaluate on, strictly: a row that is wrong is named by file and line."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tinker_atropos.errors import ConfigError, DataError, near
from tinker_atropos.rows.files import read_rows, split_files
from tinker_atropos.rows.hub import load_hub

from tinker_atropos_math_server.boxed import last_box
from tinker_atropos_math_server.config import WAYS_ON, DataSet, MathServerConfig
from tinker_atropos_math_server.latex import MAX_ANSWER, key
from tinker_atropos_math_server.problems import Mix, Problem, RowRange, in_turn, read_range

QUESTIONS = ("problem", "question", "prompt", "input")
ANSWERS = ("answer", "final_answer", "expected_answer", "gold_answer", "ground_truth", "target", "solution")
EXPECTED = '{"problem": "…", "answer": "…"}'

logger = logging.getLogger(__name__)

Located = tuple[str, Any]  # where it stands, and what it is
Row = tuple[int, str, Any]  # with its number in the split, 0 the first


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a run plays. `sets` names the sets that each split is of."""

    train: Mix
    test: Sequence[Problem]
    sets: Mapping[str, Sequence[str]]


def load(config: MathServerConfig) -> Loaded:
    """Return the problems; raises `DataError` if they can't be had or a row is wrong, `ConfigError` for bad rows."""
    train: dict[str, list[Problem]] = {}
    evaluation: dict[str, list[Problem]] = {}
    weights: dict[str, float] | None = None
    if config.datasets:
        for place, entry in enumerate(config.datasets):
            train[entry.label] = _one_set(entry, f"env.datasets.{place}", ("train",))
        if config.datasets[0].weight is not None:
            weights = {entry.label: entry.weight or 0.0 for entry in config.datasets}
    else:
        entry = config.single
        train[entry.label], rest = _train_and_test(config, wants_test=config.evaluation is None)
        if rest:
            evaluation[entry.label] = rest
    for place, entry in enumerate(config.evaluation or ()):
        setting = "env.dataset" if config.eval_sets is None else f"env.eval_sets.{place}"
        evaluation[entry.label] = _one_set(entry, setting, ("test", "train"))
    return Loaded(
        Mix(_held_out(train, evaluation), weights),
        in_turn(list(evaluation.values())),
        {"train": tuple(train), "test": tuple(evaluation)},
    )


def _train_and_test(config: MathServerConfig, *, wants_test: bool) -> tuple[list[Problem], list[Problem]]:
    """Return what the one data set gives to train and to evaluate on, no row of it to both."""
    entry = config.single
    splits = _splits(entry, "env.dataset")
    train_range, test_range = _range(config.train_rows), _range(config.test_rows)
    if "train" in splits and "test" in splits:
        train, test = _slice(splits["train"], train_range, "env.train_rows", entry), splits["test"]
        test = _slice(test, test_range, "env.test_rows", entry) if wants_test else []
    elif "test" in splits and train_range is None:
        raise DataError(
            f"env.dataset: {entry.dataset!r} has only a test split, and nothing says what to train on; set "
            "env.train_rows, such as env.train_rows=100:500 to train on its rows 101 to 500 and to evaluate on the "
            "others, or give a data set with train"
        )
    else:
        (rows,) = splits.values()
        train, test = _shared(rows, train_range, test_range, entry, wants_test=wants_test and len(rows) > 0)
        if "test" not in splits and test_range is None:
            test = []  # it is for training; what train_rows leaves out is left out
    return _problems(train, entry), _problems(test, entry)


def _shared(
    rows: list[Row], train: RowRange | None, test: RowRange | None, entry: DataSet, *, wants_test: bool
) -> tuple[list[Row], list[Row]]:
    """Divide the rows of one split: what one range does not name is for the other."""
    places = range(len(rows))
    of_train = _places(places, train, "env.train_rows", entry)
    of_test = _places(places, test, "env.test_rows", entry)
    if train is not None and test is not None and of_train & of_test:
        raise ConfigError(
            f"env.test_rows: {test} and env.train_rows {train} share rows of {entry.dataset!r}; what is "
            "trained on can't be a test"
        )
    if train is None:
        of_train = set(places) - of_test if test is not None else set(places)
    if test is None:
        of_test = set(places) - of_train
    if not of_train:
        raise ConfigError(f"env.test_rows: {test} leaves no row of {entry.dataset!r} to train on")
    return [rows[place] for place in sorted(of_train)], [rows[place] for place in sorted(of_test)] if wants_test else []


def _places(places: range, rows: RowRange | None, setting: str, entry: DataSet) -> set[int]:
    return set(_slice(places, rows, setting, entry))


def _one_set(entry: DataSet, setting: str, preferred: Sequence[str]) -> list[Problem]:
    splits = _splits(entry, setting)
    split = entry.split or next((name for name in preferred if name in splits), None)
    if split is None or split not in splits:
        holds = ", ".join(splits) or "none"
        wanted = split or preferred[0]
        close = near(wanted, splits) or (
            f" Set {setting}.split={next(iter(splits))} and {setting}.rows to take rows of that one" if splits else ""
        )
        raise DataError(f"{setting}: {entry.dataset!r} has no split {wanted!r}; it has {holds}.{close}")
    return _problems(_slice(splits[split], _range(entry.rows), f"{setting}.rows", entry), entry)


def _splits(entry: DataSet, setting: str) -> dict[str, list[Row]]:
    found: dict[str, list[Located]]
    if entry.is_local:
        found = {
            split: [row for file in files for row in _file_rows(file)]
            for split, files in split_files(entry.dataset, setting).items()
        }
    else:
        loaded = load_hub(entry.dataset, entry.subset, ways_on=f"{setting}={WAYS_ON}", setting=setting)
        found = {
            split: [(f"{entry.dataset}, {split} row {place}", row) for place, row in enumerate(loaded[split], start=1)]
            for split in loaded
        }
    return {split: [(number, *row) for number, row in enumerate(rows)] for split, rows in found.items()}


def _file_rows(file: Any) -> Iterable[Located]:
    rows = list(read_rows(file, EXPECTED))
    if not rows:
        raise DataError(f"{file} is empty; expected one problem a line, like {EXPECTED}")
    return rows


def _range(text: str | None) -> RowRange | None:
    return None if text is None else read_range(text)


def _slice(rows: Any, wanted: RowRange | None, setting: str, entry: DataSet) -> Any:
    if wanted is None:
        return rows
    try:
        start, stop = wanted.bounds(len(rows))
    except ValueError:
        raise ConfigError(
            f"{setting}: {wanted} reaches beyond the {len(rows)} rows of {entry.dataset!r}; the last that goes is "
            f"{len(rows)}, as in {max(0, len(rows) - 16)}:{len(rows)}"
        ) from None
    return rows[start:stop]


def _problems(rows: Sequence[Row], entry: DataSet) -> list[Problem]:
    return list(_each(rows, entry))


def _each(rows: Sequence[Row], entry: DataSet) -> Iterator[Problem]:
    for number, where, row in rows:
        question, answer = read_row(row, where, entry.question_field, entry.answer_field)
        yield Problem(question, answer, entry.label, number)


def read_row(row: Any, where: str, question_field: str | None, answer_field: str | None) -> tuple[str, str]:
    r"""Return question and answer of a row; raises `DataError` that begins with `where`.

    The answer is the field's whole text, or what stands in its last `\boxed{}` or behind `####`; of a field `solution`
    only that.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: expected an object like {EXPECTED}, got {type(row).__name__} {row!r:.60}")
    question_name = _field(row, where, question_field, QUESTIONS, "question")
    answer_name = _field(row, where, answer_field, ANSWERS, "answer")
    question = row[question_name]
    if isinstance(question, Sequence) and not isinstance(question, str):
        question = _asked(question)
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: {question_name!r} must be a text, got {question!r:.60}")
    answer = _answer(row[answer_name], answer_name, where)
    for name, text in ((question_name, question), (answer_name, answer)):
        try:
            text.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{where}: {name!r} holds half a surrogate pair, which is no text; got {text!r:.60}"
            ) from None
    return question, answer


def _field(row: Mapping[str, Any], where: str, named: str | None, known: Sequence[str], kind: str) -> str:
    if named is not None:
        if row.get(named) is None:
            raise DataError(
                f"{where}: no field {named!r}, which {kind}_field names; it has {_fields(row)}."
                f"{near(named, map(str, row))}"
            )
        return named
    found = next((name for name in known if row.get(name) not in (None, "")), None)
    if found is None:
        raise DataError(
            f"{where}: no field with the {kind}, such as {', '.join(known[:3])}; it has {_fields(row)}. Name it with "
            f"env.{kind}_field"
        )
    return found


def _fields(row: Mapping[str, Any]) -> str:
    return ", ".join(repr(name) for name in list(row)[:12]) or "none"


def _asked(messages: Sequence[Any]) -> Any:
    """Return what the user says in a prompt that is a list of messages."""
    last = messages[-1] if messages else None
    return last.get("content") if isinstance(last, Mapping) and last.get("role") == "user" else None


def _answer(value: Any, name: str, where: str) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        (value,) = value
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DataError(f"{where}: {name!r} must be a text or a number, got {value!r:.60}")
    text = str(value).strip() if not isinstance(value, int) or abs(value) < 10**300 else ""
    boxed = last_box(text) if "box" in text else None
    if boxed is None and "####" in text:
        boxed = text.rpartition("####")[2]
    if boxed is None and name == "solution":
        raise DataError(
            f"{where}: 'solution' must give its answer in \\boxed{{}} or behind ####; it ends with {text[-60:]!r}. "
            "Name another field with env.answer_field"
        )
    answer = (text if boxed is None else boxed).strip()
    if not answer or not key(answer[:MAX_ANSWER]) or len(answer) > MAX_ANSWER:
        size = f"{len(answer)} characters" if answer else "nothing"
        raise DataError(
            f"{where}: {name!r} must hold an answer of 1 to {MAX_ANSWER} characters, or end with one in \\boxed{{}}; "
            f"got {size}{f', {answer[:40]!r}…' if answer else ''}"
        )
    return answer


def _held_out(
    train: Mapping[str, Sequence[Problem]], evaluation: Mapping[str, Sequence[Problem]]
) -> dict[str, list[Problem]]:
    """Return the training problems without those that an evaluation asks, and say how many those are."""
    asked = {_alike(problem.question) for problems in evaluation.values() for problem in problems}
    kept = {name: [p for p in problems if _alike(p.question) not in asked] for name, problems in train.items()}
    for name, problems in train.items():
        left_out = len(problems) - len(kept[name])
        if left_out:
            logger.warning(
                "%d of %d problems of %s are in an evaluation set too; they are not trained on",
                left_out,
                len(problems),
                name,
            )
        if not kept[name]:
            raise DataError(
                f"every problem of {name!r} that is to be trained on is in an evaluation set too; choose other rows"
                if problems
                else f"there is no problem of {name!r} to train on"
            )
    return kept


def _alike(question: str) -> str:
    return re.sub(r"\s+", "", question).lower()
