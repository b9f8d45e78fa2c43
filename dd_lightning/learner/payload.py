"""Fragments as bytes, on the learner's side: contributions out, Θ in.

Runs in the comm thread. Parameters go by the run's codec, buffers always raw.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from dd_lightning.algorithm import (
    CODECS,
    NoCodec,
    dtype_from_name,
    dtype_name,
    outer_gradient,
    resolve,
)
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.link_actions import Upload
from dd_lightning.protocol.messages import Payload, TensorInfo, TensorPart

_RAW = NoCodec()
THETA_BYTES = 4  # of an element


@dataclass(frozen=True, slots=True)
class Coder:
    """Encodes uploads and decodes Θ for one layout and codec."""

    shapes: Mapping[str, tuple[int, ...]]
    buffers: frozenset[str]
    codec: object

    @classmethod
    def of(cls, tensors: tuple[TensorInfo, ...], codec: object) -> Coder:
        """`codec`: the run's `algorithm.codec` setting."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        buffers = frozenset(tensor.name for tensor in tensors if tensor.kind == "buffer")
        return cls(shapes, buffers, resolve("algorithm.codec", codec, CODECS))

    @property
    def wants_deltas(self) -> bool:
        """Whether contributions go as base minus values."""
        return self.codec.encodes == "delta"  # type: ignore[attr-defined]

    def too_large(self, fragments: Sequence[Sequence[str]], max_mib: int) -> str:
        """Why this run's fragments cannot travel, "" where they can: Θ comes as float32."""
        for index, names in enumerate(fragments):
            mib = THETA_BYTES * sum(math.prod(self.shapes[name]) for name in names) / 2**20
            if mib > max_mib:
                return (
                    f"fragment {index} has {mib:.0f} MiB, the run's max_message_mib is {max_mib}: "
                    "give the syncer more algorithm.fragments, or a larger max_message_mib"
                )
        return ""

    def encode(self, upload: Upload) -> tuple[Payload, memoryview]:
        """Tensors in name order. Values without an anchor go raw, whatever the codec."""
        anchor = upload.anchor if isinstance(upload, Snapshot) else None
        by_codec = anchor is not None or (isinstance(upload, Snapshot) and not self.wants_deltas)
        codec = self.codec if by_codec else _RAW
        parts, chunks = [], []
        for name in sorted(upload.values):
            tensor, coder = upload.values[name], codec
            if name in self.buffers:
                coder = _RAW
            elif anchor is not None:
                tensor = outer_gradient(anchor[name], tensor)
            parts.append(TensorPart(name, dtype_name(tensor.dtype), 0, tensor.numel()))
            chunks.append(coder.encode(tensor))  # type: ignore[attr-defined]
        data = memoryview(b"".join(chunks))
        payload = Payload(
            codec=codec.name,  # type: ignore[attr-defined]
            kind="delta" if anchor is not None else "values",
            parts=tuple(parts),
            num_bytes=data.nbytes,
            digest=f"{zlib.crc32(data):08x}",
        )
        return payload, data

    def decode(self, payload: Payload, data: memoryview | None) -> dict[str, Tensor]:
        """Θ_p by name.

        Raises:
            ValueError: the bytes are not what the header says, or the layout is not ours.
        """
        if data is None or data.nbytes != payload.num_bytes:
            given = 0 if data is None else data.nbytes
            raise ValueError(f"a fragment came with {given} bytes instead of {payload.num_bytes}")
        if f"{zlib.crc32(data):08x}" != payload.digest:
            raise ValueError("a fragment's checksum does not hold")
        tensors: dict[str, Tensor] = {}
        start = 0
        for part in payload.parts:
            shape = self.shapes.get(part.name)
            if shape is None or part.length != math.prod(shape):
                raise ValueError(f"a fragment holds {part.name} ({part.length} elements): not ours")
            dtype = dtype_from_name(part.dtype)
            end = start + _RAW.num_bytes(shape, dtype)
            tensors[part.name] = _RAW.decode(data[start:end], shape, dtype)
            start = end
        return tensors
