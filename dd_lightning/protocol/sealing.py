"""Checksums of headers: bytes that changed on their way are told from bytes that were sent so."""

from __future__ import annotations

import zlib

CHECKSUM_BYTES = 4


class Corrupt(ValueError):
    """Bytes that changed on their way: a checksum does not hold."""


def seal(body: bytes) -> bytes:
    """`body` with its checksum (crc32, little-endian) at the end."""
    return body + zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little")


def unseal(header: bytes | memoryview) -> bytes | memoryview:
    """The body of what `seal` made. Raises Corrupt."""
    body, checksum = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
    if zlib.crc32(body).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise Corrupt("a header's checksum does not hold: its bytes changed on their way")
    return body
