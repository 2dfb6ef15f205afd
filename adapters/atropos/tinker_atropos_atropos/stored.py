"""What the API keeps of a group: the JSON as it came, compact, and the little that must be known without reading it."""

from __future__ import annotations

import msgspec
from tinker_atropos.state import StoredItem

from tinker_atropos_atropos.bodies import WORTH_GZIP, gunzip, gzipped
from tinker_atropos_atropos.posted import Arrived

KIND = "atropos.group"
KEYED = "k"  # no digest begins so


class Meta(msgspec.Struct, frozen=True):
    """What `meta` of a stored group has.

    `sequences`: how many; `env`: the number of its environment, or None; `gzip`: whether the body is compressed;
    `size`: bytes of the JSON.
    """

    sequences: int
    env: int | None
    gzip: bool
    size: int


def meta_of(item: StoredItem) -> Meta:
    """Return what is known of a stored group without reading it."""
    return msgspec.convert(item.meta, Meta)


def json_of(item: StoredItem) -> bytes:
    """Return a stored group's JSON."""
    meta = meta_of(item)
    return gunzip(item.body, meta.size) if meta.gzip else item.body


def store(arrived: Arrived, compressed: bytes | None = None, key: str | None = None, content: str = "") -> StoredItem:
    """Return what is kept of a group, under its poster's `key` or else `content`; `is_keyed` tells which.

    `compressed` is the gzip that its JSON came as, if it came alone in one.
    """
    body = compressed
    if body is None and len(arrived.body) >= WORTH_GZIP:
        body = gzipped(arrived.body)
    meta = Meta(arrived.sequences, arrived.posted.env_id, body is not None, len(arrived.body))
    id = (content or arrived.digest) if key is None else f"{KEYED}{key}"
    return StoredItem(id, KIND, arrived.body if body is None else body, msgspec.to_builtins(meta))


def is_keyed(item: StoredItem) -> bool:
    """Return whether the poster gave the name of what `store` returned."""
    return item.id.startswith(KEYED)
