"""What a text environment learns during a run: told what ended, kept beside each manifest, restored from there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tinker_atropos.errors import CheckpointError, PluginError
from tinker_atropos.run_folder import write_atomically
from tinker_atropos.trajectory import Group, TaskRef


def state_file(folder: Path, step: int) -> Path:
    """Return the place of an environment's state beside the manifest of a step."""
    return folder / "manifests" / f"environment-{step:06d}.json"


class EnvironmentState:
    """The part of an environment that `ended`, `snapshot` and `restore` are of; nothing of it where it has none."""

    def __init__(self, environment: Any) -> None:
        self._name = f"environment {getattr(environment, 'name', type(environment).__name__)!r}"
        self._ended: Callable[[Sequence[Group]], None] | None = getattr(environment, "ended", None)
        self._snapshot: Callable[[], Mapping[str, Any]] | None = getattr(environment, "snapshot", None)
        self._restore: Callable[[Mapping[str, Any]], None] | None = getattr(environment, "restore", None)
        if (self._snapshot is None) != (self._restore is None):
            has, lacks = ("restore", "snapshot") if self._snapshot is None else ("snapshot", "restore")
            raise PluginError(f"{self._name} has {has}() and no {lacks}(); it needs both or neither")
        self._first = self._taken()

    @property
    def lasts(self) -> bool:
        """Whether there is anything to keep."""
        return self._first is not None

    def ended(self, groups: Sequence[Group]) -> None:
        """Tell the environment which groups ended with a step, in the run's order."""
        if self._ended is None:
            return
        try:
            self._ended(groups)
        except Exception as error:
            raise PluginError(f"ended() of {self._name} failed: {type(error).__name__}: {error}") from error

    async def write(self, path: Path) -> None:
        """Write a snapshot, whole or not at all."""
        await asyncio.to_thread(write_atomically, path, (self._taken() or "").encode())

    async def read(self, path: Path | None) -> None:
        """Take up the snapshot of a checkpoint; None: the beginning of the run."""
        if self._first is None or self._restore is None:
            return
        try:
            text = self._first if path is None else await asyncio.to_thread(path.read_text, "utf-8")
            state = json.loads(text)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path}, what {self._name} had learned by this checkpoint, can't be read: {error}; put it back, or "
                "start a new run"
            ) from None
        try:
            self._restore(state)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from error
        except Exception as error:
            raise PluginError(f"restore() of {self._name} failed: {type(error).__name__}: {error}") from error

    def _taken(self) -> str | None:
        if self._snapshot is None:
            return None
        try:
            return json.dumps(self._snapshot(), allow_nan=False)
        except Exception as error:
            raise PluginError(
                f"snapshot() of {self._name} must return what JSON can hold: {type(error).__name__}: {error}"
            ) from error


def why_skipped(environment: Any, task: TaskRef) -> str:
    """Return why the environment does not want a task played now; "" where it does, or never says."""
    skip = getattr(environment, "skip", None)
    if skip is None:
        return ""
    try:
        reason = skip(task)
    except Exception as error:
        raise PluginError(f"skip() of the environment failed: {type(error).__name__}: {error}") from error
    if not isinstance(reason, str):
        raise PluginError(
            f'skip() of the environment returned {reason!r:.60}; expected why it is skipped, "" to play it'
        )
    return reason
