"""Packs a vector environment's state into named arrays, and checks what comes back. Knows no simulator."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tinker_atropos.errors import CheckpointError

NAMES = frozenset(("state", "random", "positions", "observations", "elapsed", "pending", "faults", "steps"))


def pack(task: str, **values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return copies of the values, with the task's id as `task`."""
    return {"task": np.array(task), **{name: np.array(value) for name, value in values.items()}}


def unpack(
    task: str, snapshot: Mapping[str, NDArray[Any]], like: Mapping[str, NDArray[Any]]
) -> Mapping[str, NDArray[Any]]:
    """Return the snapshot if it is one of this task whose arrays have the shapes of `like`; else `CheckpointError`."""
    missing = NAMES - set(snapshot)
    if "task" not in snapshot or missing:
        raise CheckpointError(
            f"this is no snapshot of {task}: it lacks {', '.join(sorted(missing | {'task'} - set(snapshot)))}"
        )
    if str(snapshot["task"]) != task:
        raise CheckpointError(
            f"the snapshot is of {snapshot['task']}, and this is {task}; resume with the run's own env"
        )
    for name, expected in like.items():
        if snapshot[name].shape != expected.shape:
            raise CheckpointError(
                f"the snapshot's {name} have shape {snapshot[name].shape}, here they have {expected.shape}; resume "
                "with the run's own env options and env.num_envs"
            )
    return snapshot
