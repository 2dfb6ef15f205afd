"""What the tests of runs read of a run folder, and how they end one or disturb it."""

from __future__ import annotations

from typing import Any

from tinker_atropos import EnvironmentSpec, Task, single_turn
from tinker_atropos.rollout.records import read_records
from tinker_atropos.run_folder import RunFolder


class Killed(BaseException):
    """As good as kill -9: nobody catches it, nothing more is saved."""


def metrics_of(config: Any) -> list[dict[str, Any]]:
    return RunFolder(config.folder).read_metrics()


def timeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock."""
    clocked = ("time", "tokens/per_second", "trainer/busy")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k not in clocked} for row in rows]


def records_of(config: Any) -> list[dict[str, Any]]:
    """Rollout records without what names the lineage."""
    found = []
    for path in sorted((config.folder / "rollouts").glob("step-*.jsonl.gz")):
        for record in read_records(path):
            record.pop("group")
            for trajectory in record["trajectories"]:
                trajectory.pop("policies")
            found.append(record)
    return found


def flaky(failing: set[int]) -> EnvironmentSpec:
    """A single-turn environment whose reward fails at the given calls."""
    calls = 0

    def reward(completion, task):
        nonlocal calls
        calls += 1
        if calls in failing or -1 in failing:
            raise OSError("the judge is away")
        return len(set(completion.text)) and int(completion.text) / 10

    return single_turn("flaky", lambda split: [Task(f"{n}:") for n in range(20)] if split == "train" else [], reward)
