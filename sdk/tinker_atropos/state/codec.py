"""Items of a State as bytes and back, exactly. Knows no store; reads nothing that can run code.

    magic "TAI" + format  4 bytes    compression  1    (3 free)    checksum of all that follows  u32
    length of the head    u32        length of head and arrays, uncompressed  u64                (8 free)
    then the head, and the arrays each on a boundary of 16 bytes; both compressed together, if at all

The head is JSON. What JSON can't hold is an object with the key `$`: a value class by its name, a tuple, a dictionary
with other keys than strings, bytes, an array (little-endian, by dtype, shape and offset). Floats are exact, NaN and
infinity included. Arrays are decoded as read-only views of the bytes given, or of their decompressed form.
"""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from tinker_atropos.control import Fragment
from tinker_atropos.state.protocol import Item, StateError, StoredItem
from tinker_atropos.trajectory import Group, PolicyRef, Segment, TaskRef, Trajectory

Compression: TypeAlias = Literal["none", "zlib", "zstd"]

FORMAT = 1
MAGIC = b"TAI"
HEADER = struct.Struct("<3sBB3xIIQ8x")
COMPRESSIONS: tuple[Compression, ...] = ("none", "zlib", "zstd")
MAX_BYTES = 400 << 20  # of one item, uncompressed; Redis itself takes values of up to 512 MiB
COMPRESS_ABOVE = 128 << 10  # bytes; below, it costs more than it saves
ALIGNMENT = 16

# What may be in an item. A class that travels is added here; its fields are then part of the format.
CLASSES: dict[str, type[Any]] = {
    value.__name__: value for value in (Group, Trajectory, Segment, PolicyRef, TaskRef, Fragment, StoredItem)
}
FIELDS = {name: tuple(field.name for field in dataclasses.fields(value)) for name, value in CLASSES.items()}
NEEDED = {
    name: {
        field.name
        for field in dataclasses.fields(value)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    for name, value in CLASSES.items()
}


class CodecError(StateError):
    """An item can't be written as bytes, or bytes are no item."""


def encode(item: Item, *, compress: Compression | None = None, above: int = COMPRESS_ABOVE) -> bytes:
    """Return the bytes of an item, compressed where it is larger than `above` bytes and becomes smaller by a tenth.

    `compress` None: zstd if it is installed, else none. Raises `CodecError` for values that can't be written.
    """
    if type(item).__name__ not in CLASSES or not isinstance(getattr(item, "id", None), str):
        raise CodecError(f"{_type(item)} is no item; what can be written: {', '.join(CLASSES)}, with a string as id")
    writer = _Writer()
    try:
        head = json.dumps(writer.pack(item, type(item).__name__), separators=(",", ":")).encode("ascii")
    except RecursionError:
        raise CodecError(f"item {item.id!r} is nested too deeply to be written") from None
    except ValueError as error:  # an int of thousands of digits
        raise CodecError(f"item {item.id!r} can't be written: {error}") from None
    body = b"".join([head, b"\0" * (-len(head) % ALIGNMENT), *writer.chunks])
    if len(body) > MAX_BYTES:
        raise CodecError(
            f"item {item.id!r} is {len(body) >> 20} MiB, at most {MAX_BYTES >> 20} can be kept; make groups or "
            "fragments smaller"
        )
    size, method, packed = len(body), 0, body
    if size > above:
        method, packed = _compressed(body, compress)
    return HEADER.pack(MAGIC, FORMAT, method, zlib.crc32(packed), len(head), size) + packed


def decode(data: bytes) -> Any:
    """Return the item that the bytes hold. Raises `CodecError` for bytes that are damaged, foreign or from later on."""
    method, head_length, size, packed = _opened(data)
    body = _decompressed(packed, method, size)
    if len(body) != size or head_length > size:
        raise CodecError(f"damaged item: {len(body)} bytes where {size} were written")
    try:
        head = json.loads(bytes(body[:head_length]))
        item = _Reader(body[head_length + -head_length % ALIGNMENT :]).unpack(head)
    except CodecError:
        raise
    except RecursionError:
        raise CodecError("damaged item: nested too deeply") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        raise CodecError(f"damaged item: {type(error).__name__}: {error}") from error
    if type(item).__name__ not in CLASSES or not isinstance(getattr(item, "id", None), str):
        raise CodecError(f"the bytes hold {_type(item)}, which is no item")
    return item


def _opened(data: bytes) -> tuple[int, int, int, memoryview]:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise CodecError(f"an item is decoded from bytes, not from {_type(data)}")
    if len(data) < HEADER.size or bytes(data[:3]) != MAGIC:
        raise CodecError(f"{len(data)} bytes that are no item of tinker-atropos (they begin {bytes(data[:8])!r})")
    _, version, method, checksum, head_length, size = HEADER.unpack_from(data)
    if version != FORMAT or method >= len(COMPRESSIONS):
        raise CodecError(
            f"the item has format {version}.{method}, this tinker-atropos reads format {FORMAT}; use one version in "
            "all services"
        )
    packed = memoryview(data)[HEADER.size :]
    if zlib.crc32(packed) != checksum:
        raise CodecError("damaged item: its checksum is wrong")
    if size > MAX_BYTES:
        raise CodecError(f"damaged item: it claims {size} bytes, at most {MAX_BYTES} can be kept")
    return method, head_length, size, packed


def _compressed(body: bytes, compress: Compression | None) -> tuple[int, bytes]:
    if compress is None:
        compress = "zstd" if _zstandard() else "none"
    if compress == "none":
        return 0, body
    if compress == "zlib":
        packed = zlib.compress(body, 1)
    elif compress == "zstd":
        packed = _needed_zstandard().ZstdCompressor(level=1).compress(body)
    else:
        raise ValueError(f"compression {compress!r} is unknown; there are {', '.join(COMPRESSIONS)}")
    return (COMPRESSIONS.index(compress), packed) if len(packed) <= 0.9 * len(body) else (0, body)


def _decompressed(packed: memoryview, method: int, size: int) -> memoryview:
    """Return the uncompressed bytes, never more than were announced."""
    if COMPRESSIONS[method] == "none":
        return packed
    try:
        if COMPRESSIONS[method] == "zlib":
            engine = zlib.decompressobj()
            return memoryview(engine.decompress(packed, size + 1))
        zstandard = _needed_zstandard()
        if zstandard.frame_content_size(packed) != size:
            raise CodecError("damaged item: its compressed part has another size than announced")
        return memoryview(zstandard.ZstdDecompressor().decompress(packed, max_output_size=size))
    except CodecError:
        raise
    except Exception as error:  # zlib.error, ZstdError
        raise CodecError(f"damaged item: {error}") from error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        return None
    return zstandard


def _needed_zstandard() -> Any:
    found = _zstandard()
    if found is None:
        raise CodecError("the item is compressed with zstd: pip install zstandard")
    return found


class _Writer:
    """Turns values into JSON; arrays and bytes go into `chunks`, each of a length that keeps the next one aligned."""

    def __init__(self) -> None:
        self.chunks: list[Any] = []
        self.offset = 0

    def pack(self, value: Any, where: str) -> Any:
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [self.pack(entry, f"{where}[{place}]") for place, entry in enumerate(value)]
        if kind is tuple:
            return {"$": "tuple", "of": [self.pack(entry, f"{where}[{place}]") for place, entry in enumerate(value)]}
        if kind in (bytes, bytearray, memoryview):
            return {"$": "bytes", "at": self._add(bytes(value)), "length": len(bytes(value))}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, where)
        name = kind.__name__
        if CLASSES.get(name) is kind:
            return {"$": name} | {field: self.pack(getattr(value, field), f"{where}.{field}") for field in FIELDS[name]}
        if isinstance(value, Mapping):
            if "$" in value or not all(type(key) is str for key in value):
                pairs = [[self.pack(key, where), self.pack(entry, f"{where}[{key!r}]")] for key, entry in value.items()]
                return {"$": "dict", "of": pairs}
            return {key: self.pack(entry, f"{where}.{key}") for key, entry in value.items()}
        raise CodecError(
            f"{where} is {_type(value)}, which can't be kept; use None, bool, int, float, str, bytes, arrays of "
            "numbers, and lists, tuples and dictionaries of them"
        )

    def _array(self, value: Any, where: str) -> dict[str, Any]:
        if value.dtype.kind not in "biufc":
            raise CodecError(f"{where} is an array of dtype {value.dtype}, which can't be kept; use numbers")
        array = np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C")
        packed = {
            "$": "array" if isinstance(value, np.ndarray) else "scalar",
            "dtype": array.dtype.str,
            "shape": list(array.shape),
            "at": self.offset,
        }
        self._add(array.reshape(-1).view(np.uint8).data)
        return packed

    def _add(self, chunk: Any) -> int:
        began = self.offset
        padding = -len(chunk) % ALIGNMENT
        self.chunks += [chunk, b"\0" * padding]
        self.offset += len(chunk) + padding
        return began


class _Reader:
    """Turns JSON back into values; arrays are views of `chunks`."""

    def __init__(self, chunks: memoryview) -> None:
        self.chunks = chunks
        self._special: dict[str, Callable[[Any], Any]] = {
            "tuple": lambda value: tuple(map(self.unpack, value["of"])),
            "dict": lambda value: {self.unpack(key): self.unpack(entry) for key, entry in value["of"]},
            "bytes": lambda value: bytes(self._taken(value["at"], value["length"])),
            "array": self._array,
            "scalar": lambda value: self._array(value)[()],
        }

    def unpack(self, value: Any) -> Any:
        if type(value) is list:
            return [self.unpack(entry) for entry in value]
        if type(value) is not dict:
            return value
        if "$" not in value:
            return {key: self.unpack(entry) for key, entry in value.items()}
        name = value["$"]
        if name in self._special:
            return self._special[name](value)
        if name not in CLASSES:
            raise CodecError(f"the item holds a {name!r}, unknown to this tinker-atropos; use one version everywhere")
        fields = {key: self.unpack(entry) for key, entry in value.items() if key != "$"}
        unknown, missing = sorted(fields.keys() - set(FIELDS[name])), sorted(NEEDED[name] - fields.keys())
        if unknown:
            raise CodecError(
                f"the item comes from a later tinker-atropos: {name} has a field {unknown[0]!r} that is unknown here; "
                "use one version in all services"
            )
        if missing:
            raise CodecError(f"damaged item: {name} without its field {missing[0]!r}")
        return CLASSES[name](**fields)

    def _array(self, value: Any) -> Any:
        dtype, shape = np.dtype(value["dtype"]), tuple(value["shape"])
        if dtype.kind not in "biufc" or not all(type(side) is int and side >= 0 for side in shape):
            raise CodecError(f"damaged item: an array of {dtype} with shape {shape}")
        count = 1
        for side in shape:
            count *= side
        return np.frombuffer(self._taken(value["at"], count * dtype.itemsize), dtype).reshape(shape)

    def _taken(self, at: int, length: int) -> memoryview:
        if at < 0 or length < 0 or at + length > len(self.chunks):
            raise CodecError(f"damaged item: {length} bytes at {at} of {len(self.chunks)}")
        return self.chunks[at : at + length]


def _type(value: Any) -> str:
    return f"{'an' if type(value).__name__[:1] in 'aeiouAEIOU' else 'a'} {type(value).__name__}"
