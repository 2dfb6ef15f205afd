"""What the API keeps of a group: the JSON as it came, compact, and the little that must be known without reading it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tinker_atropos_atropos.bodies import WORTH_GZIP, gunzip, gzipped
from tinker_atropos_atropos.posted import Arrived

KIND = "atropos.group"


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A posted group at rest.

    `meta` has `sequences` (how many), `env` (the number of its environment, or None), `gzip` (whether `body` is
    compressed) and `size` (bytes of the JSON).
    """

    id: str
    body: bytes
    meta: Mapping[str, Any] = field(default_factory=dict)
    kind: str = KIND

    @property
    def sequences(self) -> int:
        """How many sequences the group holds."""
        return int(self.meta["sequences"])

    @property
    def env(self) -> int | None:
        """The number of the environment that posted it, where it said so."""
        number = self.meta.get("env")
        return None if number is None else int(number)

    def json(self) -> bytes:
        """Return the group's JSON."""
        return gunzip(self.body, int(self.meta["size"])) if self.meta["gzip"] else self.body


def store(arrived: Arrived, compressed: bytes | None = None, key: str | None = None) -> StoredItem:
    """Return what is kept of a group, under its poster's `key` or its content's digest.

    `compressed` is the gzip that its JSON came as, if it came alone in one.
    """
    body = compressed
    if body is None and len(arrived.body) >= WORTH_GZIP:
        body = gzipped(arrived.body)
    meta = {
        "sequences": arrived.sequences,
        "env": arrived.posted.env_id,
        "gzip": body is not None,
        "size": len(arrived.body),
    }
    return StoredItem(arrived.digest if key is None else f"k{key}", arrived.body if body is None else body, meta)
