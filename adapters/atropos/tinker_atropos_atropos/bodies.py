"""Bodies of requests: bounded gunzip, and gzip of what is kept or sent."""

from __future__ import annotations

import zlib

from isal import isal_zlib
from isal.igzip_lib import IsalError

GZIP = 31
"""`wbits` of a gzip member, as zlib counts them."""
WORTH_GZIP = 1000
"""Bytes from which on a body is compressed; the original's threshold for its answers."""
LEVEL = 1


class BadBody(ValueError):
    """A body that is not what its headers say."""


class TooLarge(ValueError):
    """A body beyond its limit."""


def gunzip(body: bytes, limit: int) -> bytes:
    """Return what gzip `body` holds, members one after the other; at most `limit` bytes are ever made.

    Raises `BadBody` on what is no gzip or ends early, `TooLarge` beyond the limit.
    """
    parts: list[bytes] = []
    made = 0
    rest = body
    while rest:
        member = isal_zlib.decompressobj(wbits=GZIP)
        try:
            part = member.decompress(rest, max_length=limit - made + 1)
        except (zlib.error, IsalError, ValueError) as error:  # type: ignore[misc] # its stub calls it a value
            raise BadBody(f"the body is no valid gzip: {error}") from error
        made += len(part)
        if made > limit:
            raise TooLarge(f"the body holds more than {limit} bytes once it is decompressed")
        if not member.eof:
            raise BadBody("the gzip body ends before its end")
        parts.append(part)
        rest = member.unused_data.lstrip(b"\0")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def gzipped(body: bytes) -> bytes:
    """Return `body` as one gzip member."""
    packer = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP)
    return b"".join((packer.compress(body), packer.flush()))
