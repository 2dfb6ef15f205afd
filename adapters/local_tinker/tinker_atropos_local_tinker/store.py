"""The folder of checkpoints: PEFT adapters with metadata, written whole or not at all, found again after a restart.

In the store: `lock`, held by the one server that uses it; `journal.jsonl`; and for each model `runs/<model id>/` with

    run.json                   what was trained, and how it began
    weights/<name>/            adapter_config.json, adapter_model.safetensors, optimizer.safetensors, checkpoint.json
    sampler_weights/<name>/    the same without the optimiser
    external_weights/<name>/   likewise
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from tinker_atropos.errors import ConfigError, UserError, near

from tinker_atropos_local_tinker.answers import NotFound
from tinker_atropos_local_tinker.records import KINDS, PREFIX, Checkpoint, Kind, Run, read_checkpoint, read_run

if TYPE_CHECKING:
    from torch import Tensor

PEFT_FILES = ("adapter_config.json", "adapter_model.safetensors")

log = logging.getLogger(__name__)

_DRAFT, _ASIDE = ".tmp-", ".old-"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:=+@-]{0,127}")


class Store:
    """Reads and writes one store folder; raises `ConfigError` where another server already has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            (folder / "runs").mkdir(parents=True, exist_ok=True)
            self._lock: IO[str] = (folder / "lock").open("a+")
        except OSError as error:
            raise ConfigError(
                f"store {folder}: {error.strerror or error}; give a folder that can be written"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "unknown"
            self._lock.close()
            raise ConfigError(
                f"store {folder} is in use by another server (process {owner}); stop that one or give another folder"
            ) from error
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()
        self._damaged: set[Path] = set()  # logged already
        self._clear_left_overs()

    def _clear_left_overs(self) -> None:
        """Undo what a crash in mid-write left behind: drafts go, an old checkpoint whose place is empty comes back."""
        for aside in self.folder.glob(f"runs/*/*/{_ASIDE}*"):
            final = aside.parent / aside.name.removeprefix(_ASIDE)
            if final.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                aside.rename(final)
        for draft in self.folder.glob(f"runs/*/*/{_DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)

    def close(self) -> None:
        """Let another server have the store."""
        self._lock.close()

    @property
    def journal_path(self) -> Path:
        """Return where the journal is."""
        return self.folder / "journal.jsonl"

    def add_run(self, run: Run) -> None:
        """Write down a new run; one that is known already keeps its record."""
        folder = self.folder / "runs" / run.model_id
        if not (folder / "run.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            _write_file(folder / "run.json", json.dumps(asdict(run), indent=1).encode())

    def run(self, model_id: str) -> Run | None:
        """Return what is known of a run, or None."""
        path = self.folder / "runs" / model_id / "run.json"
        return read_run(path) if _plain(model_id) and path.is_file() else None

    def runs(self) -> list[Run]:
        """Return every run, newest first; one whose record is damaged is left out."""
        found = []
        for path in self.folder.glob("runs/*/run.json"):
            with self._skipping(path):
                found.append(read_run(path))
        return sorted(found, key=lambda run: (-run.created, run.model_id))

    def checkpoints(self, model_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints, of one run or of all, oldest first; expired ones are deleted on the way.

        One whose metadata is damaged is left out.
        """
        if model_id is not None and not _plain(model_id):
            return []
        found = []
        for path in self.folder.glob(f"runs/{model_id or '*'}/*/*/checkpoint.json"):
            if path.parent.name.startswith((_DRAFT, _ASIDE)):  # being written now
                continue
            with self._skipping(path):
                checkpoint = self._read(path.parent)
                if checkpoint is not None:
                    found.append(checkpoint)
        return sorted(found, key=lambda c: (c.created, c.path))

    def find(self, tinker_path: str) -> Checkpoint:
        """Return the checkpoint at `tinker://…`; raises `UserError` with a near path where there is none."""
        model_id, kind, name = split_path(tinker_path)
        checkpoint = self._read(self._folder(model_id, kind, name))
        if checkpoint is None:
            known = [c.path for c in self.checkpoints()]
            raise NotFound(f"no checkpoint {tinker_path} in this store; deleted or expired?{near(tinker_path, known)}")
        return checkpoint

    def files(self, checkpoint: Checkpoint) -> Path:
        """Return the checkpoint's folder."""
        return self._folder(checkpoint.model_id, checkpoint.kind, checkpoint.name)

    def save(
        self,
        checkpoint: Checkpoint,
        peft_config: Mapping[str, Any],
        adapter: Mapping[str, Tensor],
        optimizer: Mapping[str, Tensor] | None = None,
        *,
        overwrite: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint whole; raises `UserError` where the name is taken and `overwrite` is not set.

        `before` is called when all is on the disk but not in its place yet.
        """
        from safetensors.torch import save_file

        check_name(checkpoint.name)
        final = self.files(checkpoint)
        if self._read(final) is not None and not overwrite:
            raise UserError(f"checkpoint {checkpoint.path} exists; choose another name or save with overwrite=True")
        final.parent.mkdir(parents=True, exist_ok=True)
        draft = final.parent / f"{_DRAFT}{uuid.uuid4().hex}"
        draft.mkdir()
        try:
            _write_file(draft / "adapter_config.json", json.dumps(peft_config, indent=1).encode())
            save_file(dict(adapter), draft / "adapter_model.safetensors")
            if optimizer is not None:
                save_file(dict(optimizer), draft / "optimizer.safetensors")
            size = sum(path.stat().st_size for path in draft.iterdir())
            done = replace(checkpoint, size_bytes=size)
            _write_file(draft / "checkpoint.json", json.dumps(asdict(done), indent=1).encode())
            for path in draft.iterdir():
                _sync(path)
            _sync(draft)
            if before is not None:
                before()
            self._put(draft, final)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return done

    def load(self, checkpoint: Checkpoint) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
        """Return the adapter's tensors, and the optimiser's where they were saved."""
        from safetensors.torch import load_file

        folder = self.files(checkpoint)
        optimizer = folder / "optimizer.safetensors"
        return load_file(folder / "adapter_model.safetensors"), load_file(optimizer) if optimizer.is_file() else None

    def delete(self, checkpoint: Checkpoint) -> None:
        """Delete a checkpoint."""
        folder = self.files(checkpoint)
        grave = folder.parent / f"{_DRAFT}{uuid.uuid4().hex}"
        folder.rename(grave)
        shutil.rmtree(grave, ignore_errors=True)

    def set_expiry(self, checkpoint: Checkpoint, expires: float | None) -> None:
        """Change when a checkpoint expires (Unix seconds), or that it does."""
        changed = replace(checkpoint, expires=expires)
        _write_file(self.files(checkpoint) / "checkpoint.json", json.dumps(asdict(changed), indent=1).encode())

    def _folder(self, model_id: str, kind: str, name: str) -> Path:
        return self.folder / "runs" / model_id / kind / name

    def _read(self, folder: Path) -> Checkpoint | None:
        try:
            checkpoint = read_checkpoint(folder)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if checkpoint.expires is not None and checkpoint.expires <= time.time():
            with contextlib.suppress(OSError):
                self.delete(checkpoint)
            return None
        return checkpoint

    @contextlib.contextmanager
    def _skipping(self, path: Path) -> Iterator[None]:
        """Log what is damaged, once, instead of failing the whole listing."""
        try:
            yield
        except (UserError, OSError) as error:
            if path not in self._damaged:
                self._damaged.add(path)
                log.warning("left out of listings: %s", error)

    @staticmethod
    def _put(draft: Path, final: Path) -> None:
        """Move `draft` to `final`. A folder can't replace another in one step, so an old one steps aside first."""
        aside = final.parent / f"{_ASIDE}{final.name}"
        if final.exists():
            final.rename(aside)
        draft.rename(final)
        _sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def split_path(tinker_path: str) -> tuple[str, Kind, str]:
    """Return model id, kind and name of `tinker://<model id>/<kind>/<name>`; raises `UserError` on anything else."""
    parts = tinker_path.removeprefix(PREFIX).split("/")
    if not tinker_path.startswith(PREFIX) or len(parts) != 3 or parts[1] not in KINDS or not _plain(parts[0]):
        raise UserError(f"{tinker_path!r} is no checkpoint path; it looks like tinker://<run>/weights/<name>")
    check_name(parts[2])
    kind: Kind = next(kind for kind in KINDS if kind == parts[1])
    return parts[0], kind, parts[2]


def check_name(name: str) -> None:
    """Raise `UserError` unless `name` can name a checkpoint."""
    if not _NAME.fullmatch(name):
        raise UserError(
            f"checkpoint name {name!r} is not allowed; use 1 to 128 letters, digits and . _ - : = + @, "
            f"the first one a letter, digit or _"
        )


def _plain(model_id: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:-]*", model_id) is not None


def _write_file(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
