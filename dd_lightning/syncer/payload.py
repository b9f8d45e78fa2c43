"""Payloads of fragments: bytes beside a header to tensors by name, checked, and back.

A payload that does not hold what its header and the layout promise is refused whole; the reasons
are the constants below, as learners and the tape see them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dd_lightning.algorithm import Codec, NoCodec, dtype_from_name
from dd_lightning.protocol.held import NON_FINITE
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.messages import Payload, TensorPart

BYTE_COUNT = "byte count"
CHECKSUM = "checksum"
CODEC = "codec"
LAYOUT = "layout"

_RAW = NoCodec()


class PayloadError(ValueError):
    """A payload is refused. `reason` is one of the constants above."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Encoded:
    """A header and its bytes; the bytes are never written again, so many sends may share them."""

    payload: Payload
    data: memoryview

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """Views (not copies) of the float32 tensors that `encode_values` put in."""
        found, start = {}, 0
        flat = torch.frombuffer(self.data, dtype=torch.float32) if self.data.nbytes else None
        for part in self.payload.parts:
            shape = shapes[part.name]
            whole = torch.empty(0) if flat is None else flat[start : start + part.length]
            found[part.name] = whole.view(shape)
            start += part.length
        return found


def checksum(data: memoryview | bytes) -> str:
    """crc32 of the bytes, eight hex digits."""
    return f"{zlib.crc32(data):08x}"


def encode_values(tensors: Mapping[str, Tensor]) -> Encoded:
    """Float32 values in name order, copied once: later changes of the tensors do not show."""
    names = sorted(tensors)
    lengths = [tensors[name].numel() for name in names]
    flat = torch.empty(sum(lengths), dtype=torch.float32)
    for name, target in zip(names, flat.split(lengths), strict=True):
        target.copy_(tensors[name].detach().reshape(-1))
    data = memoryview(flat.view(torch.uint8).numpy())
    parts = tuple(
        TensorPart(name, "float32", 0, length) for name, length in zip(names, lengths, strict=True)
    )
    return Encoded(
        Payload(
            codec="none",
            kind="values",
            parts=parts,
            num_bytes=data.nbytes,
            digest=checksum(data),
        ),
        data,
    )


class PayloadReader:
    """Decodes what learners send, for one layout and the run's codec."""

    def __init__(self, layout: Layout, codec: Codec) -> None:
        self._codec = codec
        self._fragments = layout.fragments
        self._shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
        self._buffers = {tensor.name for tensor in layout.tensors if tensor.kind == "buffer"}

    def decode(
        self, fragment: int, payload: Payload, data: memoryview | None, *, whole: bool = False
    ) -> dict[str, Tensor]:
        """Tensors by name: every parameter of the fragment, and the buffers that were sent.

        Args:
            whole: every buffer must be there too (version 0).

        Raises:
            PayloadError: with its reason; nothing of the payload may be used then.
        """
        codec = self._codec_of(payload)
        self._check_parts(fragment, payload, whole)
        codecs = [_RAW if part.name in self._buffers else codec for part in payload.parts]
        sizes = [
            self._num_bytes(part, coder) for part, coder in zip(payload.parts, codecs, strict=True)
        ]
        self._check_bytes(payload, data, sum(sizes))
        assert data is not None  # _check_bytes
        tensors, start = {}, 0
        for part, coder, size in zip(payload.parts, codecs, sizes, strict=True):
            tensors[part.name] = self._decode_part(part, coder, data[start : start + size])
            start += size
        return tensors

    def _codec_of(self, payload: Payload) -> Codec:
        if payload.codec == "none" and payload.kind == "values":
            return _RAW
        if payload.codec == self._codec.name and payload.kind == self._codec.encodes:
            return self._codec
        raise PayloadError(
            CODEC,
            f"{payload.kind} by codec {payload.codec}; this run takes {self._codec.encodes} by "
            f"{self._codec.name}, or values by none",
        )

    def _check_parts(self, fragment: int, payload: Payload, whole: bool) -> None:
        if not 0 <= fragment < len(self._fragments):
            raise PayloadError(LAYOUT, f"fragment {fragment} of {len(self._fragments)}")
        names = [part.name for part in payload.parts]
        known = set(self._fragments[fragment])
        needed = known if whole else known - self._buffers
        if len(set(names)) != len(names) or set(names) - known or needed - set(names):
            odd = sorted((set(names) - known) | (needed - set(names)))
            raise PayloadError(LAYOUT, f"tensors of fragment {fragment} differ: {odd[:3]}")
        for part in payload.parts:
            if (part.offset, part.length) != (0, math.prod(self._shapes[part.name])):
                raise PayloadError(
                    LAYOUT,
                    f"{part.name} has elements {part.offset} to {part.offset + part.length}; "
                    f"its shape is {self._shapes[part.name]}, and only whole tensors are taken",
                )

    def _num_bytes(self, part: TensorPart, codec: Codec) -> int:
        try:
            return codec.num_bytes(self._shapes[part.name], dtype_from_name(part.dtype))
        except ValueError as error:
            raise PayloadError(CODEC, f"{part.name}: {error}") from error

    def _check_bytes(self, payload: Payload, data: memoryview | None, expected: int) -> None:
        given = 0 if data is None else data.nbytes
        if data is None or not given == payload.num_bytes == expected:
            raise PayloadError(
                BYTE_COUNT, f"{given} came, {payload.num_bytes} announced, {expected} expected"
            )
        if checksum(data) != payload.digest:
            raise PayloadError(CHECKSUM, f"{checksum(data)}, announced {payload.digest}")

    def _decode_part(self, part: TensorPart, codec: Codec, data: memoryview) -> Tensor:
        try:
            tensor = codec.decode(data, self._shapes[part.name], dtype_from_name(part.dtype))
        except Exception as error:  # a codec may be the user's: its failure is the sender's
            raise PayloadError(CODEC, f"{part.name}: {type(error).__name__}: {error}") from error
        if not _finite(tensor):
            raise PayloadError(NON_FINITE, part.name)
        return tensor


def _finite(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    # one pass and no mask in memory: NaN goes through both ends
    return all(math.isfinite(float(end)) for end in torch.aminmax(tensor))


def is_16_bit(dtype: str) -> bool:
    """Of a learner's parameters; an unknown name is not: what it contributes is refused."""
    try:
        return dtype_from_name(dtype).itemsize == 2
    except ValueError:
        return False
