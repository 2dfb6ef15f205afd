"""Turns a data set of the Hugging Face hub into problems."""

from __future__ import annotations

from tinker_atropos.errors import DataError
from tinker_atropos.rows.hub import load_hub

from tinker_atropos_gsm8k.config import GSM8K, WAYS_ON
from tinker_atropos_gsm8k.problems import Problem
from tinker_atropos_gsm8k.rows import SPLITS, to_problem


def read_hub(dataset: str, subset: str | None) -> dict[str, list[Problem]]:
    """Return the problems of a hub data set by split; raises `DataError` as `load_hub` does, or for a wrong row."""
    name = subset if subset is not None else ("main" if dataset == GSM8K else None)
    loaded = load_hub(dataset, name, ways_on=WAYS_ON)
    found = {
        split: [
            to_problem(row, f"{dataset}, {split} row {number}") for number, row in enumerate(loaded[split], start=1)
        ]
        for split in SPLITS
        if split in loaded
    }
    if not found:
        raise DataError(
            f"env.dataset: {dataset!r} has neither a train nor a test split; it has {', '.join(loaded) or 'none'}"
        )
    return found
