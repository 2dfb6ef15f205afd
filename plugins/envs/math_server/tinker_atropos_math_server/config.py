"""The `env` section of a run with this environment, and which of its settings go together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field, field_validator, model_validator
from tinker_atropos.environment import EnvironmentConfig, PromptFormat
from tinker_atropos.errors import ConfigError

from tinker_atropos_math_server.problems import read_range
from tinker_atropos_math_server.prompts import EXAMPLES

DEEPMATH = "zwhe99/DeepMath-103K"
WAYS_ON = "a folder with train.jsonl and test.jsonl, or a JSONL file (fields `problem` and `answer`)"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_DATA_SUFFIXES = (".jsonl", ".json", ".gz", ".parquet", ".csv", ".txt")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)


def _rows(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError("expected rows as START:STOP, such as 100:500")
    read_range(value)
    return value


class DataSet(EnvironmentConfig):
    """One data set of a mix, or of an evaluation."""

    dataset: str = Field(description="a hub id, a folder (train/test as JSONL or Parquet) or a JSONL file")
    name: str | None = Field(None, description="what its metrics are called; unset: the last part of `dataset`")
    subset: str | None = Field(None, description="configuration of a hub data set")
    split: str | None = Field(
        None, description="unset: train for a mix; test for an evaluation, train if there is none"
    )
    rows: str | None = Field(None, description="START:STOP, 0 the first row; unset: all")
    weight: float | None = Field(None, gt=0, allow_inf_nan=False, description="share of the mix; unset: its size")
    question_field: str | None = Field(None, description="unset: problem, question, prompt or input")
    answer_field: str | None = Field(None, description="unset: answer, final_answer, …, or the box in solution")

    _read_rows = field_validator("rows", mode="before")(_rows)

    @property
    def is_local(self) -> bool:
        """Whether it is a file or folder here, and not of the hub."""
        text = self.dataset
        path_like = text.startswith((".", "/", "~")) or text.count("/") > 1 or "\\" in text
        return path_like or text.lower().endswith(_DATA_SUFFIXES) or _exists(text)

    @property
    def label(self) -> str:
        """What its metrics are called."""
        if self.name is not None:
            return self.name
        path = Path(self.dataset)
        last = path.name
        if self.is_local and last.lower().endswith(_DATA_SUFFIXES):
            stem = last.split(".")[0]
            last = path.parent.name if stem in ("train", "test") and path.parent.name else stem
        return re.sub(r"[^a-z0-9]+", "_", last.lower()).strip("_") or "data"

    def check(self, setting: str) -> None:
        """Raise `ConfigError` for a name that is no data set's, or one that can't name a metric."""
        if not self.is_local and _HUB_ID.fullmatch(self.dataset) is None:
            raise ConfigError(
                f"{setting}: {self.dataset!r:.120} is neither a file or folder here nor a hub id (owner/name); use "
                f"{DEEPMATH}, {WAYS_ON}"
            )
        if self.is_local and self.subset is not None:
            raise ConfigError(f"{setting}: subset {self.subset!r} has no effect with a local data set; leave it out")
        if _NAME.fullmatch(self.label) is None:
            raise ConfigError(
                f"{setting}: {self.label!r:.80} can't name a metric; give it a name of letters, digits, _ . -"
            )


AIME = DataSet(dataset="HuggingFaceH4/aime_2024", name="aime24")
MATH500 = DataSet(dataset="HuggingFaceH4/MATH-500", name="math500")
AMC = DataSet(dataset="math-ai/amc23", name="amc23")


class MathServerConfig(EnvironmentConfig):
    """What the environment `math_server` accepts. A combination that can't work raises `ConfigError`."""

    dataset: str | None = Field(
        None, description=f"a hub id, a folder (train/test as JSONL or Parquet) or a JSONL file; unset: {DEEPMATH}"
    )
    subset: str | None = Field(None, description="configuration of the hub data set")
    train_rows: str | None = Field(
        None, description="START:STOP, 0 the first: rows to train on; of a data set without train, rows of its test"
    )
    test_rows: str | None = Field(None, description="START:STOP, 0 the first: rows to evaluate on")
    question_field: str | None = Field(None, description="unset: problem, question, prompt or input")
    answer_field: str | None = Field(None, description="unset: answer, final_answer, …, or the box in solution")
    datasets: tuple[DataSet, ...] = Field(
        (), description="a weighted mix in place of `dataset`: a list of dataset, weight, rows, name, split, …"
    )
    eval_sets: tuple[DataSet, ...] | None = Field(
        None, description="sets to evaluate on, each reported as `correct/NAME`; unset: what `dataset` has for a test"
    )
    prompt_format: PromptFormat = Field("chat", description="chat: messages; completion: raw text to continue")
    system_prompt: str | None = Field(None, description="system message put before each chat prompt")
    instruction: str | None = Field(
        None, description="what is asked beside the problem; unset: to reason and to box the answer; '': nothing"
    )
    few_shot: int = Field(0, ge=0, le=len(EXAMPLES), description="worked examples shown before the problem")
    format_weight: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="added for exactly one box with something in it, right or wrong"
    )
    length_weight: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="added in full for a right answer of no tokens, falling to 0"
    )
    length_tokens: int | None = Field(
        None, ge=1, description="tokens at which the length term has fallen to 0 (2048 unless set)"
    )
    grading_workers: int | None = Field(None, ge=1, le=256, description="grading processes; unset: one a core")
    grading_seconds: float = Field(2.0, gt=0, le=600, description="processor time that grading one answer may take")
    grading_memory_mb: int = Field(2048, ge=512, description="address space of a grading process")
    min_success: float | None = Field(
        None, ge=0, le=1, description="leave out problems that were solved in a smaller share of the last answers"
    )
    max_success: float | None = Field(
        None, ge=0, le=1, description="leave out problems that were solved in a larger share of the last answers"
    )
    success_window: int | None = Field(
        None, ge=1, le=10_000, description="answers that a problem's success rate is of (16 unless set)"
    )
    success_retry: float | None = Field(
        None, ge=0, le=1, description="share of the turns of a left-out problem that are played all the same (0.1)"
    )

    _read_rows = field_validator("train_rows", "test_rows", mode="before")(_rows)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.datasets:
            for key in ("dataset", "subset", "train_rows", "test_rows", "question_field", "answer_field"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"env.{key}: does not go with env.datasets, whose entries have settings of their own "
                        "(dataset, subset, split, rows, question_field, answer_field); keep one of the two"
                    )
            weighted = [entry.weight is not None for entry in self.datasets]
            if any(weighted) and not all(weighted):
                raise ConfigError(
                    f"env.datasets.{weighted.index(False)}.weight: some entries have a weight and this one has none; "
                    "weigh all of them, or none to mix them by size"
                )
            _check_all("env.datasets", self.datasets)
        else:
            self.single.check("env.dataset")
        if self.eval_sets is not None:
            if self.test_rows is not None:
                raise ConfigError(
                    "env.test_rows: does not go with env.eval_sets, whose entries have `rows`; keep one of the two"
                )
            for place, entry in enumerate(self.eval_sets):
                if entry.weight is not None:
                    raise ConfigError(
                        f"env.eval_sets.{place}.weight: an evaluation takes its sets in turn; leave it out"
                    )
            _check_all("env.eval_sets", self.eval_sets)
        if self.prompt_format == "completion" and self.system_prompt is not None:
            raise ConfigError(
                "env.system_prompt: a completion prompt has no system message; use env.prompt_format=chat, or "
                "env.instruction to put a text before the prompt"
            )
        if not self.length_weight and self.length_tokens is not None:
            raise ConfigError(
                f"env.length_tokens: {self.length_tokens} has no effect while env.length_weight is 0; set both"
            )
        low, high = self.min_success, self.max_success
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"env.min_success: {low:g} must be smaller than env.max_success, {high:g}")
        if not self.filters:
            for key in ("success_window", "success_retry"):
                if getattr(self, key) is not None:
                    raise ConfigError(
                        f"env.{key}: {getattr(self, key)!r} has no effect without env.min_success or env.max_success"
                    )
        return self

    @property
    def single(self) -> DataSet:
        """The one data set that is trained on where there is no mix."""
        return DataSet(
            dataset=DEEPMATH if self.dataset is None else self.dataset,
            subset=self.subset,
            question_field=self.question_field,
            answer_field=self.answer_field,
        )

    @property
    def evaluation(self) -> tuple[DataSet, ...] | None:
        """The sets to evaluate on; None: what the data set that is trained on has for a test."""
        if self.eval_sets is not None:
            return self.eval_sets
        if self.dataset is None and not self.datasets and self.test_rows is None:
            return (AIME, MATH500, AMC)
        return () if self.datasets else None

    @property
    def filters(self) -> bool:
        """Whether problems are left out by their success rates."""
        return self.min_success is not None or self.max_success is not None


def _check_all(setting: str, entries: tuple[DataSet, ...]) -> None:
    seen: dict[str, int] = {}
    for place, entry in enumerate(entries):
        entry.check(f"{setting}.{place}")
        if entry.label in seen:
            raise ConfigError(
                f"{setting}.{place}: its metrics would be called {entry.label!r}, as those of entry "
                f"{seen[entry.label]}; give one of them another `name`"
            )
        seen[entry.label] = place


def _exists(dataset: str) -> bool:
    try:
        return bool(dataset.strip()) and Path(dataset).exists()
    except (OSError, ValueError):  # a name too long for the file system, or with a null byte, is no path
        return False
