"""Two evaluations of one environment side by side: is there a difference, task by task?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tinker_atropos.errors import ConfigError
from tinker_atropos.evaluation.folder import EvaluationFolder, Record
from tinker_atropos.evaluation.report import by_task
from tinker_atropos.evaluation.settings import differences
from tinker_atropos.evaluation.statistics import LEVEL, Difference, paired_difference

FREE = ("model", "tasks", "samples", "environment.reference", "environment.name")
"""Settings that two evaluations may differ in: what is compared, and how much of it was asked."""


def find_evaluation(name: str, output: Path) -> EvaluationFolder:
    """Return the evaluation called `name` in the folder of evaluations, or at that path; raises `ConfigError`."""
    for path in (output / name, Path(name).expanduser()):
        folder = EvaluationFolder(path)
        if folder.exists():
            return folder
    there = sorted(path.parent.name for path in output.glob("*/settings.json")) if output.is_dir() else []
    raise ConfigError(f"there is no evaluation {name!r} in {str(output)!r}; there are {', '.join(there) or 'none'}")


def refuse_unlike(first: Mapping[str, Any], second: Mapping[str, Any], allowed: Collection[str] = ()) -> None:
    """Raise `ConfigError` where two evaluations asked other things, or in another way; `allowed` may differ."""
    free = {*FREE, *allowed}
    unlike = [
        (path, before, after)
        for path, before, after in differences(first, second)
        if not any(path == name or path.startswith(f"{name}.") for name in free)
    ]
    names = first["environment"]["name"], second["environment"]["name"]
    # An environment file is the same one by its content, wherever it lies.
    if names[0] != names[1] and None in (first["environment"]["file_sha256"], second["environment"]["file_sha256"]):
        unlike.insert(0, ("environment.name", *names))
    if unlike:
        said = "; ".join(f"{path} is {before!r:.60} and {after!r:.60}" for path, before, after in unlike[:6])
        allow = " ".join(f"--allow {path}" for path, _, _ in unlike[:6] if not path.startswith("environment."))
        raise ConfigError(
            f"these evaluations can't be compared: {said}. Evaluate both alike"
            + (f", or say what may differ: {allow}" if allow else "")
        )


def compare(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    """Return how much `second` is above `first` in the tasks that both have; raises `ConfigError` where none is."""
    shared = sorted(first.keys() & second.keys())
    if not shared:
        raise ConfigError("these evaluations have no task in common, so nothing can be paired")
    return paired_difference([first[task] for task in shared], [second[task] for task in shared])


def task_means(records: Mapping[tuple[int, int], Record]) -> dict[int, float]:
    """Return each task's mean reward over its whole samples."""
    return {
        task: sum(record["reward"] for record in samples) / len(samples)
        for task, samples in by_task(records.values()).items()
    }


def verdict(difference: Difference, first: str, second: str) -> str:
    """Say plainly whether there is a difference."""
    if not difference.shown:
        return f"no difference shown between {first} and {second} (error rate {1 - LEVEL:.0%})"
    better, worse = (second, first) if difference.mean > 0 else (first, second)
    return f"{better} is better than {worse} (error rate {1 - LEVEL:.0%})"
