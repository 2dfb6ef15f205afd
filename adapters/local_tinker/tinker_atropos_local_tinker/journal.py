"""The append-only journal of what each model was trained on; each line is synced before the request is answered.

One JSON object a line: `seq`, `time` (Unix seconds), `event`, `model`, `step` (optimiser steps of that model so far,
after the event), and by event `path` (saves and loads), `data` and `loss` (forward_backward: one hash per datum).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tinker_atropos.errors import RunError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Numbers = npt.NDArray[np.generic] | Iterable[float] | None

Event = Literal["create_model", "forward_backward", "optim_step", "save_state", "load_state", "save_sampler"]


class JournalError(RunError):
    """A line could not be written, so what it was to tell must not count."""


def datum_hash(tokens: Numbers, targets: Numbers, logprobs: Numbers = None, advantages: Numbers = None) -> str:
    """Return the SHA-256 of what one datum trains on, as hex.

    Over input tokens int32[T], target tokens int32[T], sampler logprobs float32[T] and advantages float32[T], each as
    little-endian bytes after their length as little-endian uint64. An absent field is empty.
    """
    import numpy as np

    digest = hashlib.sha256()
    for values, dtype in ((tokens, "<i4"), (targets, "<i4"), (logprobs, "<f4"), (advantages, "<f4")):
        listed = values if isinstance(values, np.ndarray) else list(values or ())
        raw = np.asarray(listed).reshape(-1).astype(dtype).tobytes()
        digest.update(len(raw).to_bytes(8, "little"))
        digest.update(raw)
    return digest.hexdigest()


class Journal:
    """Writes one journal file. Not safe for two writers: the store's lock keeps a second server out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seq = 0
        torn = False
        if path.exists():
            raw = path.read_bytes()
            torn = bool(raw) and not raw.endswith(b"\n")
            for line in read_journal(path):
                self._seq = max(self._seq, int(line["seq"]) + 1)
        self._file = path.open("ab", buffering=0)  # a buffer would bring a failed line out with a later one
        self._end = self._file.seek(0, os.SEEK_END)
        self._broken = False
        if torn:  # a power cut in mid-line: end that line, so that the next one stands by itself
            self._append(b"\n")

    def write(self, event: Event, model: str, step: int, **fields: Any) -> None:
        """Append one line and return once it is on the disk; raises `JournalError`, and then the line isn't there."""
        line = {"seq": self._seq, "time": time.time(), "event": event, "model": model, "step": step, **fields}
        self._append(json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._seq += 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, raw: bytes) -> None:
        if self._broken:
            raise JournalError(f"journal {self.path} has a line that could not be taken back; start the server anew")
        try:
            left = memoryview(raw)
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            try:
                self._file.truncate(self._end)
            except OSError:
                self._broken = True
            reason = error.strerror or error
            raise JournalError(f"journal {self.path} can't be written: {reason}; make room on that disk") from error
        self._end += len(raw)


def read_journal(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the journal's whole lines in order; a line that a power cut left half-written is skipped."""
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and "seq" in line:
                yield line
