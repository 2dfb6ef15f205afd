"""The store's records, a run's and a checkpoint's: what they say, and how they are read and checked.

They are files that people copy, cut off and edit, so that nothing in them is taken for granted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from tinker_atropos.errors import UserError

from tinker_atropos_local_tinker.fields import flag, mapping, metadata, number, text, whole

Kind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights", "external_weights")
PREFIX = "tinker://"

_LAST_SECOND = 253_402_300_799  # of the year 9999; later ones can't be written as a date

T = TypeVar("T", bound="Run | Checkpoint")


@dataclass(frozen=True, slots=True)
class Run:
    """What one model id is. Times are Unix seconds."""

    model_id: str
    base_model: str
    lora: dict[str, Any]
    created: float
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Metadata of one saved checkpoint. `step` counts optimiser steps; `weights_id` names the weights' exact bits."""

    model_id: str
    kind: Kind
    name: str
    base_model: str
    lora: dict[str, Any]
    step: int
    weights_id: str
    created: float
    expires: float | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] | None = field(default=None)

    @property
    def path(self) -> str:
        """Return the `tinker://` path."""
        return f"{PREFIX}{self.model_id}/{self.kind}/{self.name}"


def read_run(path: Path) -> Run:
    """Read a `run.json`; raises `UserError` where it is damaged."""
    return _read(path, Run, (path.parent.name,))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint's metadata; raises `UserError` where it is damaged, `FileNotFoundError` where there is none."""
    return _read(folder / "checkpoint.json", Checkpoint, folder.parts[-3:])


def _read(path: Path, kind: Callable[..., T], place: tuple[str, ...]) -> T:
    try:
        fields = json.loads(path.read_bytes())
        record = kind(**fields)
        _check(fields)
        found = (record.model_id,) if isinstance(record, Run) else (record.model_id, record.kind, record.name)
        if found != place:
            raise ValueError(f"it belongs to {'/'.join(found)}, not here")
        return record
    except (ValueError, TypeError, RecursionError, UserError) as error:
        raise UserError(f"{path} is damaged: {error}; restore it, or delete {path.parent}") from error


def _check(fields: Mapping[str, Any]) -> None:
    """Raise `UserError` where a field has the wrong type."""
    for name in {"model_id", "kind", "name", "base_model", "weights_id"} & set(fields):
        text(fields, name)
    for name in {"step", "size_bytes"} & set(fields):
        whole(name, fields[name])
    for name in ("created", "expires"):
        if name == "expires" and fields.get(name) is None:
            continue
        if not 0 <= number(name, fields[name]) <= _LAST_SECOND:
            raise UserError(f"{name}={fields[name]!r} is no time in Unix seconds")
    lora = mapping(fields, "lora") or {}
    whole("lora.rank", lora.get("rank"), 1)
    for name in ("train_attn", "train_mlp", "train_unembed"):
        flag(lora, name, True)
    metadata(fields)
