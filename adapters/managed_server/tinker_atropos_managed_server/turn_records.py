"""Sampled turns on disk, so that an endpoint that starts again still knows what it sampled before it died.

A record is a frame (magic, length, checksum), a JSON head and three little-endian arrays: `prompt int32`, `tokens
int32`, `logprobs float32`. Two files take turns: when the newer one has grown to `budget` tokens it becomes the older
one, and that is thrown away. A record that a death cut off is passed over, and what follows it too.
"""

from __future__ import annotations

import dataclasses
import logging
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
from tinker_atropos import PolicyRef, RunError, Sample
from tinker_atropos.trajectory import IntArray

log = logging.getLogger(__name__)

_FRAME = struct.Struct("<4sII")  # magic, bytes that follow, their CRC-32
_HEAD = struct.Struct("<I")
_MAGIC = b"TURN"
_TOKEN = 4  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """A sampled turn: its prompt, the sample, and how many of its tokens are text."""

    prompt: IntArray
    sample: Sample
    kept: int


class TurnRecords:
    """The records in `folder`, of about `budget` tokens at least and twice that at most."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._new, self._old = folder / "turns.bin", folder / "turns-before.bin"
        self._limit = budget * _TOKEN
        self._file: IO[bytes] | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"{folder} can't be made for the sampled turns: {error.strerror or error}") from error

    def read(self) -> Iterator[TurnRecord]:
        """Yield what was kept, oldest first."""
        for path in (self._old, self._new):
            if path.is_file():
                yield from _records(path)

    def add(self, record: TurnRecord) -> None:
        """Keep a turn; from then on the death of this process loses nothing of it."""
        body = _encoded(record)
        file = self._opened()
        if file.tell() + len(body) > self._limit and file.tell():
            file.close()
            self._new.replace(self._old)
            self._file = None
            file = self._opened()
        file.write(_FRAME.pack(_MAGIC, len(body), zlib.crc32(body)) + body)
        file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            whole = sum(size for _, size in _frames(self._new)) if self._new.is_file() else 0
            self._file = self._new.open("ab")
            self._file.truncate(whole)  # a record that a death cut off would hide all that come after it
            self._file.seek(whole)
        return self._file


def _encoded(record: TurnRecord) -> bytes:
    sample = record.sample
    head = orjson.dumps(
        {
            "prompt": len(record.prompt),
            "tokens": len(sample.tokens),
            "kept": record.kept,
            "stop_reason": sample.stop_reason,
            "ref": dataclasses.asdict(sample.ref),
        }
    )
    arrays = (
        np.asarray(record.prompt, "<i4").tobytes(),
        np.asarray(sample.tokens, "<i4").tobytes(),
        np.asarray(sample.logprobs, "<f4").tobytes(),
    )
    return b"".join((_HEAD.pack(len(head)), head, *arrays))


def _decoded(body: bytes) -> TurnRecord:
    (size,) = _HEAD.unpack_from(body)
    head: dict[str, Any] = orjson.loads(body[_HEAD.size : _HEAD.size + size])
    place = _HEAD.size + size
    prompt = np.frombuffer(body, "<i4", head["prompt"], place)
    tokens = np.frombuffer(body, "<i4", head["tokens"], place + prompt.nbytes)
    logprobs = np.frombuffer(body, "<f4", head["tokens"], place + prompt.nbytes + tokens.nbytes)
    sample = Sample(tokens, logprobs, head["stop_reason"], PolicyRef(**head["ref"]))
    return TurnRecord(prompt, sample, head["kept"])


def _records(path: Path) -> Iterator[TurnRecord]:
    for body, _ in _frames(path):
        try:
            yield _decoded(body)
        except (ValueError, KeyError, TypeError, struct.error) as error:
            log.warning("a sampled turn in %s can't be read and is passed over: %s", path, error)


def _frames(path: Path) -> Iterator[tuple[bytes, int]]:
    """Yield each whole frame's body and its length in the file, until one that is cut off or damaged."""
    with path.open("rb") as file:
        while True:
            frame = file.read(_FRAME.size)
            if not frame:
                return
            if len(frame) == _FRAME.size:
                magic, length, checksum = _FRAME.unpack(frame)
                body = file.read(length) if magic == _MAGIC else b""
                if magic == _MAGIC and len(body) == length and zlib.crc32(body) == checksum:
                    yield body, _FRAME.size + length
                    continue
            log.warning("the sampled turns in %s end in the midst of a record; what follows is passed over", path)
            return
