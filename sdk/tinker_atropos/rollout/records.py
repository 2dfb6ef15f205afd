"""Groups as lines of JSON, and back: every token, log-probability and reward exactly as it was trained on."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tinker_atropos.errors import CheckpointError
from tinker_atropos.rollout.source import Discarded
from tinker_atropos.trajectory import FloatArray, Group, PolicyRef, Segment, TaskRef, Trajectory


def group_record(
    group: Group,
    *,
    outcome: str,
    step: int,
    ordinal: int,
    reason: str = "",
    advantages: Sequence[Sequence[FloatArray]] | None = None,
) -> dict[str, Any]:
    """Return a JSON-ready record; `step` is the batch's, `ordinal` the group's place in the run's order.

    `advantages` are the trainer's, per trajectory and segment.
    """
    return {
        "group": group.id,
        "ordinal": ordinal,
        "task": dataclasses.asdict(group.task),
        "outcome": outcome,
        "reason": reason,
        "step": step,
        "overrides": dict(group.overrides),
        "trajectories": [
            trajectory_record(trajectory, None if advantages is None else advantages[place])
            for place, trajectory in enumerate(group.trajectories)
        ],
    }


def discarded_record(ended: Discarded, step: int) -> dict[str, Any]:
    """Return a JSON-ready record of a task that ended untrained before `step` was done."""
    if ended.group is not None:
        return group_record(ended.group, outcome="discarded", step=step, ordinal=ended.ordinal, reason=ended.reason)
    bare = {"group": ended.id, "ordinal": ended.ordinal, "task": dataclasses.asdict(ended.task)}
    return {**bare, "outcome": "discarded", "reason": ended.reason, "step": step, "overrides": {}, "trajectories": []}


def trajectory_record(trajectory: Trajectory, advantages: Sequence[FloatArray] | None = None) -> dict[str, Any]:
    """Return a JSON-ready record of one trajectory."""
    return {
        "reward": trajectory.reward,
        "rewards": list(trajectory.rewards),
        "finish_reasons": list(trajectory.finish_reasons),
        "policies": [dataclasses.asdict(ref) for ref in trajectory.policies],
        "messages": list(trajectory.messages),
        "metrics": dict(trajectory.metrics),
        "masked": dict(trajectory.masked),
        "truncated": trajectory.truncated,
        "segments": [
            {
                "tokens": segment.tokens.tolist(),
                "logprobs": segment.logprobs.tolist(),
                "mask": segment.mask.astype(int).tolist(),
                "advantages": _floats(segment.advantages if advantages is None else advantages[place]),
            }
            for place, segment in enumerate(trajectory.segments)
        ],
    }


def _floats(values: FloatArray | None) -> list[float] | None:
    return None if values is None else [float(value) for value in values]


def read_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Return the trajectory of a record."""
    return Trajectory(
        segments=tuple(
            Segment(
                tokens=np.asarray(segment["tokens"], np.int32),
                logprobs=np.asarray(segment["logprobs"], np.float32),
                mask=np.asarray(segment["mask"], bool),
                advantages=None if segment["advantages"] is None else np.asarray(segment["advantages"], np.float32),
            )
            for segment in record["segments"]
        ),
        rewards=tuple(record["rewards"]),
        finish_reasons=tuple(record["finish_reasons"]),
        policies=tuple(PolicyRef(**ref) for ref in record["policies"]),
        messages=tuple(record["messages"]),
        metrics=record["metrics"],
        masked=record["masked"],
        truncated=record["truncated"],
    )


def read_group(record: Mapping[str, Any]) -> Group:
    """Return the group of a record."""
    return Group(
        id=record["group"],
        task=TaskRef(**record["task"]),
        trajectories=tuple(read_trajectory(trajectory) for trajectory in record["trajectories"]),
        overrides=record["overrides"],
    )


def write_records(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a gzip of JSON lines, whole or not at all."""
    from tinker_atropos.run_folder import write_atomically

    lines = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False, default=str) + "\n" for record in records)
    # mtime 0: equal runs write equal files.
    write_atomically(path, gzip.compress(lines.encode(), compresslevel=6, mtime=0))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file; raises `CheckpointError` naming file and line for a damaged one."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                record = json.loads(line)
                number += 1
                yield record
    except (OSError, EOFError, ValueError) as error:
        raise CheckpointError(f"{path}:{number + 1}: damaged rollout file: {error}") from error
