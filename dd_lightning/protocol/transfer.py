"""Inner optimizer state in pieces: cut by the donor, put together by the receiver.

Raw little-endian elements under typed headers; nothing is unpickled. No tensors here: entries are
descriptions and bytes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dd_lightning.protocol.inner_messages import StateChunk, StatePart, StatePayload

CHUNK_BYTES = 1 << 20  # a contribution waits for one chunk at most, so it is small
CHUNK_PARTS = 256  # of one chunk; bounds the header
WINDOW = 8  # chunks that a donor may be ahead of the acknowledgements
MOST_DONORS = 3  # tried for one receiver
MOST_ENTRIES = 32  # of one parameter
SIZES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class TransferError(ValueError):
    """A transfer cannot go on: what came is not what was announced, or not what fits."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or number of an inner optimizer's state."""

    optimizer: int
    parameter: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    number: bool = False

    @property
    def length(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Raises TransferError for a dtype that cannot travel."""
        if self.dtype not in SIZES:
            raise TransferError(f"{self.parameter}, {self.key}: {self.dtype} cannot travel")
        return SIZES[self.dtype] * self.length

    @classmethod
    def of(cls, part: StatePart) -> Entry:
        """The entry that `part` is of."""
        return cls(part.optimizer, part.parameter, part.key, part.dtype, part.shape, part.number)


def cut(entries: Iterable[Entry]) -> list[tuple[StatePart, ...]]:
    """Chunks of at most CHUNK_BYTES and CHUNK_PARTS, in order; at least one, perhaps empty."""
    chunks: list[tuple[StatePart, ...]] = []
    parts: list[StatePart] = []
    room = CHUNK_BYTES
    for entry in entries:
        size, offset = SIZES[entry.dtype], 0
        while offset < entry.length or entry.length == offset == 0:
            if room < size or len(parts) == CHUNK_PARTS:
                chunks.append(tuple(parts))
                parts, room = [], CHUNK_BYTES
            length = min(entry.length - offset, room // size)
            parts.append(
                StatePart(
                    entry.optimizer, entry.parameter, entry.key, entry.dtype, entry.shape,
                    offset, length, entry.number,
                )
            )  # fmt: skip
            offset, room = offset + length, room - size * length
            if entry.length == 0:
                break
    return [*chunks, tuple(parts)]


class StateSource:
    """What a donor sends: its entries' bytes, each held until its last chunk has been taken.

    Lost with the donor or its connection: the transfer, which begins anew with another donor.

    Args:
        entries: None for bytes that are provided later, in this order.
    """

    def __init__(
        self, transfer: int, step: int, entries: Sequence[tuple[Entry, memoryview | None]]
    ) -> None:
        self.transfer = transfer
        self.taken_bytes = 0
        self._step, self._upto, self._next = step, 0, 0
        self._bytes = {entry: data for entry, data in entries if data is not None}
        self._chunks = cut(entry for entry, _ in entries)
        self._needed = [tuple(Entry.of(part) for part in parts) for parts in self._chunks]
        self._last = {e: number for number, needed in enumerate(self._needed) for e in needed}

    def provide(self, entry: Entry, data: memoryview) -> None:
        """The bytes of an entry."""
        self._bytes[entry] = data

    def allow(self, upto: int) -> None:
        """Chunks below `upto` may be sent."""
        self._upto = max(self._upto, upto)

    @property
    def ready(self) -> bool:
        """Whether a chunk may be taken now."""
        allowed = self._next < min(self._upto, len(self._chunks))
        return allowed and all(entry in self._bytes for entry in self._needed[self._next])

    @property
    def over(self) -> bool:
        """Every chunk has been taken."""
        return self._next == len(self._chunks)

    def take(self) -> tuple[StateChunk, memoryview]:
        """The next chunk (generation 0) and its bytes, copied; call while `ready`."""
        parts = self._chunks[self._next]
        pieces = []
        for part in parts:
            size = SIZES[part.dtype]
            data = self._bytes[Entry.of(part)]
            pieces.append(data[size * part.offset : size * (part.offset + part.length)])
        data = memoryview(b"".join(pieces))
        payload = StatePayload(parts=parts, num_bytes=data.nbytes, digest=f"{zlib.crc32(data):08x}")
        number, self._next = self._next, self._next + 1
        self.taken_bytes += data.nbytes
        for entry in set(self._needed[number]):
            if self._last[entry] == number:
                del self._bytes[entry]
        chunk = StateChunk(
            generation=0, transfer=self.transfer, chunk=number, last=self.over, step=self._step,
            payload=payload,
        )  # fmt: skip
        return chunk, data


class Assembly:
    """What a receiver has of one transfer.

    Args:
        check: raises TransferError for an entry that does not fit this learner.
    """

    def __init__(self, transfer: int, check: Callable[[Entry], None]) -> None:
        self.transfer = transfer
        self.chunks = 0  # that have come, in order
        self.step = 0
        self.complete = False
        self.entries: dict[Entry, bytearray] = {}
        self._filled: dict[Entry, int] = {}
        self._check = check

    def add(self, message: StateChunk, data: memoryview | bytes) -> None:
        """Take the next chunk; one that has come already is ignored.

        Raises:
            TransferError: out of order, a checksum, byte count, shape, dtype or name that does not
                hold. Nothing of the transfer may be used then.
        """
        if message.chunk < self.chunks:
            return
        if message.chunk != self.chunks:
            raise TransferError(f"chunk {message.chunk} came instead of {self.chunks}")
        data = memoryview(data)
        if data.nbytes != message.payload.num_bytes or data.nbytes > CHUNK_BYTES:
            raise TransferError(f"{data.nbytes} bytes came, {message.payload.num_bytes} announced")
        if f"{zlib.crc32(data):08x}" != message.payload.digest:
            raise TransferError("a chunk's checksum does not hold")
        start = 0
        for part in message.payload.parts:
            start = self._place(part, data, start)
        if start != data.nbytes:
            raise TransferError(f"{data.nbytes - start} bytes belong to nothing")
        self.chunks, self.step, self.complete = self.chunks + 1, message.step, message.last
        if self.complete and (torn := [e for e, n in self._filled.items() if n != e.length]):
            raise TransferError(f"{torn[0].parameter}, {torn[0].key}: elements are missing")

    def completed(self) -> list[tuple[Entry, bytearray]]:
        """Entries whose every byte has come, each handed out once."""
        done = [entry for entry in self.entries if self._filled[entry] == entry.length]
        return [(entry, self.entries.pop(entry)) for entry in done]

    def _place(self, part: StatePart, data: memoryview, start: int) -> int:
        entry = Entry.of(part)
        if entry not in self._filled:
            self._check(entry)
            self.entries[entry] = bytearray(entry.num_bytes)
            self._filled[entry] = 0
        size = SIZES[entry.dtype]
        end = start + size * part.length
        out_of_place = part.offset != self._filled[entry] or entry not in self.entries
        if out_of_place or part.offset + part.length > entry.length:
            raise TransferError(f"{entry.parameter}, {entry.key}: elements out of place")
        if end > data.nbytes:
            raise TransferError(f"{entry.parameter}, {entry.key}: bytes are missing")
        self.entries[entry][size * part.offset : size * (part.offset + part.length)] = data[
            start:end
        ]
        self._filled[entry] += part.length
        return end
