"""The part of a control run's checkpoint that is the rollout's: counters, simulations, random states; one `.npz` file.

Arrays go in as arrays and all else as JSON, so reading one runs no code.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np

from tinker_atropos.errors import CheckpointError, PluginError
from tinker_atropos.run_folder import RunFolder, write_atomically

VERSION = 1
TREE = "tree"
RESUMED_FROM = 2  # manifests: the newest, or the one before, should that be damaged


@dataclass(frozen=True, slots=True, eq=False)
class ControlState:
    """`env_steps` trained on, the next fragment's `ordinal`, and the `lanes`' snapshots.

    `lanes` None: episodes begin anew, and `missing` says why there are none. `broken` simulations were reset for a NaN
    so far.
    """

    env_steps: int
    ordinal: int
    lanes: Sequence[Mapping[str, Any]] | None
    missing: str = ""
    broken: int = 0


def state_file(folder: Path, step: int) -> Path:
    """Return the place of the state beside the manifest of a step."""
    return folder / "manifests" / f"step-{step:06d}.npz"


def write_state(path: Path, state: ControlState) -> None:
    """Write it, whole or not at all; raises `PluginError` if a snapshot holds what can't be kept."""
    arrays: dict[str, Any] = {}
    tree = {
        "version": VERSION,
        "env_steps": state.env_steps,
        "ordinal": state.ordinal,
        "missing": state.missing,
        "broken": state.broken,
        "lanes": None if state.lanes is None else _packed(list(state.lanes), arrays, "lanes"),
    }
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **{**arrays, TREE: np.array(json.dumps(tree))})
    write_atomically(path, content.getvalue())


def prune_states(folder: RunFolder) -> list[Path]:
    """Remove the states beside manifests whose checkpoint the trainer has removed; return them.

    Those of the newest two manifests stay, since a resumption begins there. Raises `OSError`.
    """
    gone = []
    for manifest in folder.manifests()[:-RESUMED_FROM]:
        path = state_file(folder.path, manifest.step)
        state = urlsplit(manifest.checkpoint.state)
        if state.scheme == "file" and not Path(unquote(state.path)).exists() and path.exists():
            path.unlink()
            gone.append(path)
    return gone


def read_state(path: Path) -> ControlState:
    """Read it; raises `CheckpointError` if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tree = json.loads(str(arrays[TREE]))
            if tree["version"] != VERSION:
                raise ValueError(f"version {tree['version']}, this program reads {VERSION}")
            lanes = None if tree["lanes"] is None else _unpacked(tree["lanes"], arrays)
            missing, broken = str(tree.get("missing", "")), int(tree.get("broken", 0))  # older files have neither
            return ControlState(int(tree["env_steps"]), int(tree["ordinal"]), lanes, missing, broken)
    except Exception as error:  # a damaged archive raises anything
        raise CheckpointError(
            f"{path} can't be read: {type(error).__name__}: {error}; remove it and the manifest beside it to continue "
            "from the one before"
        ) from error


def _packed(value: Any, arrays: dict[str, Any], path: str) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        arrays[f"a{len(arrays)}"] = value
        return {"array": f"a{len(arrays) - 1}"}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Mapping):
        return {"map": {str(key): _packed(entry, arrays, f"{path}.{key}") for key, entry in value.items()}}
    if isinstance(value, list | tuple):
        return [_packed(entry, arrays, f"{path}.{place}") for place, entry in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise PluginError(
        f"the environment's snapshot holds {value!r:.60} ({type(value).__name__}) at {path}; expected arrays, numbers, "
        "text, mappings and lists"
    )


def _unpacked(value: Any, arrays: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(entry, arrays) for entry in value]
    if isinstance(value, dict):
        if "array" in value:
            return arrays[value["array"]]
        return {key: _unpacked(entry, arrays) for key, entry in value["map"].items()}
    return value
