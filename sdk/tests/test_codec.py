"""Items survive as bytes exactly; bytes that are no sound item get a clear error."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tinker_atropos.control import Fragment
from tinker_atropos.state import StoredItem, codec
from tinker_atropos.state.codec import HEADER, MAGIC, CodecError, decode, encode
from tinker_atropos.trajectory import Group, PolicyRef, Segment, TaskRef, Trajectory

texts = st.text(st.characters(exclude_categories=()), max_size=8)  # lone surrogates too: models sample them
floats = st.floats(allow_nan=True, width=64)
plain = st.none() | st.booleans() | st.integers() | floats | texts | st.binary(max_size=8)
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(texts | st.just("$"), inner, max_size=3)
        | st.dictionaries(st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)
refs = st.builds(PolicyRef, texts, st.integers(), st.integers(), texts, st.none() | floats, st.none() | texts)


@st.composite
def segments(draw: Any) -> Segment:
    length = draw(st.integers(0, 40))
    arrays = [
        draw(hnp.arrays(dtype, length))
        for dtype in (draw(st.sampled_from([np.int32, np.int64, ">i4"])), np.float32, np.bool_, np.float32)
    ]
    return Segment(arrays[0], arrays[1], arrays[2], arrays[3] if draw(st.booleans()) else None)


trajectories = st.builds(
    Trajectory,
    st.lists(segments(), max_size=2).map(tuple),
    st.lists(floats | floats.map(np.float64), max_size=3).map(tuple),
    st.lists(st.sampled_from(["stop", "length"]), max_size=3).map(tuple),
    st.lists(refs, max_size=2).map(tuple),
    st.lists(st.dictionaries(texts, values, max_size=3), max_size=3).map(tuple),
    st.dictionaries(texts, floats, max_size=2),
    st.dictionaries(texts, st.integers(0), max_size=2),
    st.booleans(),
)
groups = st.builds(
    Group,
    texts,
    st.builds(TaskRef, texts, st.integers(), st.integers()),
    st.lists(trajectories, max_size=2).map(tuple),
    st.dictionaries(texts, values | hnp.arrays(hnp.floating_dtypes(sizes=(32, 64)), hnp.array_shapes()), max_size=2),
)


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal in type and content, NaN equal to itself."""
    if isinstance(left, np.ndarray):
        return (
            isinstance(right, np.ndarray)
            and left.shape == right.shape
            and left.dtype.newbyteorder("<") == right.dtype.newbyteorder("<")
            and left.astype(right.dtype).tobytes() == right.tobytes()
        )
    if type(left) is not type(right):
        return False
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(map(repr, left)) == list(map(repr, right)) and all(map(same, left.values(), right.values()))
    if isinstance(left, float):
        return struct.pack("<d", left) == struct.pack("<d", right) or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(groups, st.sampled_from(["none", "zlib", "zstd"]))
def test_a_group_survives_exactly(group: Group, compress: Any) -> None:
    assert same(decode(encode(group, compress=compress, above=0)), group)


@given(st.builds(StoredItem, texts, texts, st.binary(max_size=100), st.dictionaries(texts, values, max_size=3)))
@settings(deadline=None)
def test_stored_bytes_survive_exactly(item: StoredItem) -> None:
    assert same(decode(encode(item)), item)


def group_of(tokens: int = 1_000, **overrides: Any) -> Group:
    segment = Segment(np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), np.ones(tokens, bool))
    ref = PolicyRef("run", 0, 3, "tinker://x")
    said = ({"role": "user", "content": "ü"},)
    trajectory = Trajectory((segment,), (1.0,), ("stop",), (ref,), said)
    return Group("a", TaskRef("train", 1, 2), (trajectory,), overrides)


def test_a_fragment_survives() -> None:
    floats = np.random.default_rng(0).normal(size=(5, 2, 3)).astype(np.float32)
    flags = np.zeros((4, 2), bool)
    fragment = Fragment(
        "f", floats, floats[:4], floats[:4, :, 0], floats[:4, :, 1], flags, flags, floats[0][:0],
        PolicyRef("run", 0, 0, "file:///x"), ((1.5, 7),), {"speed": 1.0},
    )  # fmt: skip
    again = decode(encode(fragment))
    assert same(again, dataclasses.replace(fragment, logprobs=fragment.logprobs.copy()))


@pytest.mark.parametrize("compress", ["none", "zstd"])
def test_arrays_are_views_aligned_and_read_only(compress: Any) -> None:
    (segment,) = decode(encode(group_of(), compress=compress, above=0)).trajectories[0].segments
    for array in (segment.tokens, segment.logprobs, segment.mask):
        assert array.base is not None
        assert not array.flags.writeable
        assert array.flags.aligned


def test_large_items_are_compressed_where_that_helps() -> None:
    group = group_of(200_000)
    assert len(encode(group, compress="none")) > 1_800_000
    assert len(encode(group)) < 1_000_000
    assert len(encode(group, compress="zlib")) < 1_000_000
    noise = StoredItem("n", "noise", np.random.default_rng(0).bytes(200_000))
    assert len(encode(noise)) < 201_000
    assert decode(encode(noise)) == noise


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), r"overrides\.x is an object, which can't be kept"),
        ({1, 2}, "is a set"),
        (np.array(["a"]), "array of dtype"),
        (np.array([object()]), "array of dtype object"),
        ([{"deep": lambda: 0}], r"x\[0\]\.deep is a function"),
    ],
)
def test_what_cannot_be_written_is_named(value: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        encode(group_of(x=value))


def test_nesting_and_size_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(CodecError, match="nested too deeply"):
        encode(group_of(x=deep))
    monkeypatch.setattr(codec, "MAX_BYTES", 1 << 20)
    with pytest.raises(CodecError, match="at most 1 can be kept"):
        encode(StoredItem("a", "test", bytes(2 << 20)))


NO_ITEMS: list[Any] = [None, "text", Trajectory((), (), (), (), ()), StoredItem(5, "x", b"")]  # type: ignore[arg-type]


@pytest.mark.parametrize("value", NO_ITEMS)
def test_only_items_are_written(value: Any) -> None:
    with pytest.raises(CodecError, match="is no item"):
        encode(value)


@pytest.mark.parametrize("data", [b"", b"TAI", b"\x80\x04K\x01.", b"GET / HTTP/1.1\r\n" * 5, bytes(100)])
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError, match="no item of tinker-atropos"):
        decode(data)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused(data: Any) -> None:
    whole = encode(group_of(50, x=b"bytes"), compress=data.draw(st.sampled_from(["none", "zlib", "zstd"])), above=0)
    place = data.draw(st.integers(0, len(whole) - 1))
    if data.draw(st.booleans()):
        damaged = whole[:place]
    else:
        damaged = whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :]
    try:
        again = decode(damaged)
    except CodecError:
        return
    assert same(again, decode(whole))  # a bit that nothing depends on


def forged(head: Any, chunks: bytes = b"", **header: Any) -> bytes:
    """Return bytes with a right checksum and a wrong content."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    body = text + bytes(-len(text) % 16) + chunks
    fields = {"version": 1, "method": 0, "length": len(text), "size": len(body)} | header
    packed = fields.get("packed", body)
    return (
        HEADER.pack(
            MAGIC, fields["version"], fields["method"], zlib.crc32(packed), fields["length"], fields["size"]
        )
        + packed
    )  # fmt: skip


BOMB = zlib.compress(bytes(10_000_000))
STORED = {"$": "StoredItem", "id": "a", "kind": "k", "body": {"$": "bytes", "at": 0, "length": 2}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (forged(STORED, b"ab", version=2), "use one version in all services"),
        (forged(STORED, b"ab", method=9), "use one version in all services"),
        (forged(STORED | {"later": 1}, b"ab"), "later tinker-atropos: StoredItem has a field 'later'"),
        (forged({"$": "Later", "id": "a"}), "'Later', unknown to this tinker-atropos"),
        (forged({"$": "StoredItem", "id": "a"}), "without its field 'body'"),
        (forged(STORED, b"a"), "2 bytes at 0 of 1"),
        (forged(STORED | {"body": {"$": "bytes", "at": -1, "length": 1}}, b"ab"), "1 bytes at -1"),
        (forged(STORED | {"body": {"$": "array", "dtype": "O", "shape": [1], "at": 0}}, bytes(8)), "array of object"),
        (forged(STORED | {"body": {"$": "array", "dtype": "<f4", "shape": [1 << 30], "at": 0}}), "bytes at 0 of 0"),
        (forged(STORED | {"body": {"$": "array", "dtype": "<f4", "shape": [-1], "at": 0}}), "shape"),
        (forged(STORED | {"body": {"$": "array", "dtype": "<f4,<f4", "shape": [1], "at": 0}}), "damaged"),
        (forged(STORED | {"id": 7}, b"ab"), "no item"),
        (forged({"id": "a"}), "a dict, which is no item"),
        (forged(b"{"), "damaged item: JSONDecodeError"),
        (forged(b"[" * 100_000), "nested too deeply"),
        (forged(STORED, b"ab", length=1 << 31), "damaged item"),
        (forged(STORED, b"ab", size=1 << 40), "it claims"),
        (forged(STORED, b"ab", method=1), "damaged item"),
        (forged(STORED, b"ab", method=2), "damaged item"),
        (forged(STORED, method=1, size=10, length=5, packed=BOMB), "damaged item: 11 bytes"),
    ],
)  # fmt: skip
def test_hostile_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        decode(data)
