"""Sampled turns on disk, so that an endpoint that starts again still knows what it sampled before it died.

A file is a row of frames: magic, length, checksum, body. The body of a prompt (`PRMT`) is its tokens, `int32`. That of
a turn (`TURN`) is the digest of its prompt, a JSON head, `tokens int32` and `logprobs float32`; all is little-endian.
A file holds each prompt once, before its first turn, and needs no other file.

Two files take turns: when the newer one has grown to `budget` tokens it becomes the older one, and the older one is
thrown away. A damaged frame is passed over; reading goes on at the next magic.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import mmap
import re
import struct
import threading
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
_HEAD = struct.Struct("<16sI")  # digest of the prompt, bytes of the JSON
_PROMPT, _TURN = b"PRMT", b"TURN"
_MAGIC = re.compile(b"PRMT|TURN")
_TOKEN = 4  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class TurnRecord:
    """A sampled turn: its prompt, the sample, and how many of its tokens are text."""

    prompt: IntArray
    sample: Sample
    kept: int


class TurnRecords:
    """The records in `folder`: the last `budget` tokens of them (4 bytes each) at least, and twice that at most.

    A turn takes less room here than in `SampledTurns`, so that equal budgets lose nothing of what those remember.
    Several threads may add.
    """

    def __init__(self, folder: Path, budget: int) -> None:
        self._new, self._old = folder / "turns.bin", folder / "turns-before.bin"
        self._limit = budget * _TOKEN
        self._file: IO[bytes] | None = None
        self._size = 0
        self._prompts: set[bytes] = set()  # the digests of those in the newer file
        self._lock = threading.Lock()
        self.lost = 0
        """How many turns could not be written, for want of room on the disk and the like."""
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
        """Keep a turn; from then on the death of this process loses nothing of it.

        One that can't be written is counted in `lost`, and only the first of them is logged.
        """
        prompt = np.asarray(record.prompt, "<i4").tobytes()
        digest = _digest(prompt)
        turn = _frame(_TURN, _encoded(record, digest))
        with self._lock:
            try:
                self._write(prompt, digest, turn)
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    log.warning(
                        "a sampled turn can't be written to %s (%s), so a restart will not know it; sampling goes on, "
                        "and further ones are only counted, as `unrecorded`",
                        self._new,
                        error.strerror or error,
                    )

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._close()

    def _write(self, prompt: bytes, digest: bytes, turn: bytes) -> None:
        file = self._opened()
        known = digest in self._prompts
        data = turn if known else _frame(_PROMPT, prompt) + turn
        if self._size and self._size + len(data) > self._limit:
            self._close()
            self._new.replace(self._old)
            file = self._opened()
            if known:
                data = _frame(_PROMPT, prompt) + turn
        try:
            _write_all(file, data)
        except OSError:
            self._close()  # opened again it is cut back to what is whole
            raise
        self._size += len(data)
        self._prompts.add(digest)

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._size, self._prompts = 0, set()
            for magic, body, end in _frames(self._new) if self._new.is_file() else ():
                self._size = end
                if magic == _PROMPT:
                    self._prompts.add(_digest(body))
            file = self._new.open("ab", buffering=0)
            try:
                file.truncate(self._size)  # only what comes after the last whole frame: a frame that a death cut off
            except OSError:
                file.close()
                raise
            self._file = file
        return self._file


def _write_all(file: IO[bytes], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _digest(prompt: bytes) -> bytes:
    return hashlib.blake2b(prompt, digest_size=16).digest()


def _frame(magic: bytes, body: bytes) -> bytes:
    return _FRAME.pack(magic, len(body), zlib.crc32(body)) + body


def _encoded(record: TurnRecord, digest: bytes) -> bytes:
    sample = record.sample
    head = orjson.dumps(
        {
            "tokens": len(sample.tokens),
            "kept": record.kept,
            "stop_reason": sample.stop_reason,
            "ref": dataclasses.asdict(sample.ref),
        }
    )
    arrays = (np.asarray(sample.tokens, "<i4").tobytes(), np.asarray(sample.logprobs, "<f4").tobytes())
    return b"".join((_HEAD.pack(digest, len(head)), head, *arrays))


def _decoded(body: bytes, prompts: dict[bytes, IntArray]) -> TurnRecord:
    """Return the turn; raises `KeyError` where its prompt is not among `prompts` (by digest)."""
    digest, size = _HEAD.unpack_from(body)
    place = _HEAD.size + size
    head: dict[str, Any] = orjson.loads(body[_HEAD.size : place])
    tokens = np.frombuffer(body, "<i4", head["tokens"], place)
    logprobs = np.frombuffer(body, "<f4", head["tokens"], place + tokens.nbytes)
    sample = Sample(tokens, logprobs, head["stop_reason"], PolicyRef(**head["ref"]))
    return TurnRecord(prompts[digest], sample, head["kept"])


def _records(path: Path) -> Iterator[TurnRecord]:
    prompts: dict[bytes, IntArray] = {}
    unread = 0
    for magic, body, _ in _frames(path):
        try:
            if magic == _PROMPT:
                prompts[_digest(body)] = np.frombuffer(body, "<i4")
            else:
                yield _decoded(body, prompts)
        except (ValueError, KeyError, TypeError, struct.error):
            unread += 1
    if unread:
        log.warning("%d sampled turns in %s can't be read, or their prompt can't; they are passed over", unread, path)


def _frames(path: Path) -> Iterator[tuple[bytes, bytes, int]]:
    """Yield of each whole frame its magic, its body, and where it ends in the file."""
    if not path.stat().st_size:
        return
    damaged = 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        place = 0
        while match := _MAGIC.search(content, place):
            damaged += match.start() > place
            place = match.start()
            found = _body_at(content, place)
            if found is None:
                damaged += 1
                place += 1
                continue
            place += _FRAME.size + len(found)
            yield match.group(), found, place
        damaged += place < len(content)
    if damaged:
        log.warning("the sampled turns in %s are damaged or cut off; what is whole is kept", path)


def _body_at(content: mmap.mmap, place: int) -> bytes | None:
    start = place + _FRAME.size
    if start > len(content):
        return None
    _, length, checksum = _FRAME.unpack_from(content, place)
    if start + length > len(content):
        return None
    body = content[start : start + length]
    return body if zlib.crc32(body) == checksum else None
