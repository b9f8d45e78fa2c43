"""How a tensor becomes bytes on the wire and back: raw, or outer gradients rounded to bfloat16.

Bytes are little-endian, row-major, and carry no shape or dtype: the typed header beside them does.
Nothing is unpickled; a wrong number of bytes is refused.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from dd_lightning.algorithm.checks import check_int, refuse

_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

Bytes = bytes | bytearray | memoryview


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a floating dtype, such as "bfloat16".

    Raises:
        ValueError: any other dtype.
    """
    if dtype not in _NAMES:
        fix = "Freeze such tensors, or keep them out of the module's persistent state."
        raise refuse("dtype", dtype, " | ".join(_DTYPES), fix)
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a wire name.

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise refuse("dtype", name, " | ".join(_DTYPES))
    return _DTYPES[name]


@runtime_checkable
class Codec(Protocol):
    """A codec; the `_target_` of `algorithm.codec` is a class of such objects.

    `encodes` says what it is given: a learner's "values", or its "delta" (base minus local).
    """

    name: str
    encodes: Literal["values", "delta"]

    def encode(self, tensor: Tensor) -> Bytes:
        """Return the bytes of `tensor`; they may share its memory, so it must not change."""
        ...

    def decode(self, buffer: Bytes, shape: Sequence[int], dtype: torch.dtype | str) -> Tensor:
        """Return a new CPU tensor of `shape` and `dtype` from what `encode` gave."""
        ...

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype | str) -> int:
        """Return the exact number of bytes that `encode` gives for such a tensor."""
        ...


@dataclass(frozen=True, slots=True)
class NoCodec:
    """Codec `none`: raw values in their own dtype; contiguous CPU tensors are not copied."""

    name: ClassVar[str] = "none"
    encodes: ClassVar[Literal["values", "delta"]] = "values"

    def encode(self, tensor: Tensor) -> memoryview:
        dtype_name(tensor.dtype)
        return _to_bytes(tensor)

    def decode(self, buffer: Bytes, shape: Sequence[int], dtype: torch.dtype | str) -> Tensor:
        return _from_bytes(buffer, shape, _as_dtype(dtype))

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype | str) -> int:
        return _numel(shape) * _as_dtype(dtype).itemsize


@dataclass(frozen=True, slots=True)
class BFloat16Codec:
    """Codec `bf16`: deltas rounded to nearest even in bfloat16, relative error at most 2^-8.

    Only deltas: rounded values would move Theta by the rounding at every merge.
    """

    name: ClassVar[str] = "bf16"
    encodes: ClassVar[Literal["values", "delta"]] = "delta"

    def encode(self, tensor: Tensor) -> memoryview:
        dtype_name(tensor.dtype)
        return _to_bytes(tensor.to(torch.bfloat16))

    def decode(
        self, buffer: Bytes, shape: Sequence[int], dtype: torch.dtype | str = torch.float32
    ) -> Tensor:
        return _from_bytes(buffer, shape, torch.bfloat16).to(_as_dtype(dtype))

    def num_bytes(self, shape: Sequence[int], dtype: torch.dtype | str = torch.float32) -> int:
        return _numel(shape) * torch.bfloat16.itemsize


CODECS: dict[str, type] = {"none": NoCodec, "bf16": BFloat16Codec}


def _as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    return dtype_from_name(dtype if isinstance(dtype, str) else dtype_name(dtype))


def _numel(shape: Sequence[int]) -> int:
    return math.prod(check_int("a dimension of shape", size, 0) for size in shape)


def _require_little_endian() -> None:
    if sys.byteorder != "little":
        raise RuntimeError("tensors travel little-endian; this machine is big-endian.")


def _to_bytes(tensor: Tensor) -> memoryview:
    _require_little_endian()
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def _from_bytes(buffer: Bytes, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    _require_little_endian()
    source = np.frombuffer(buffer, dtype=np.uint8)
    expected = _numel(shape) * dtype.itemsize
    if source.size != expected:
        raise ValueError(
            f"buffer holds {source.size} bytes; shape {tuple(shape)} of {dtype_name(dtype)} takes "
            f"exactly {expected}. The message is truncated or belongs to another layout."
        )
    # copied: the buffer may be read-only, unaligned, or reused by the transport
    tensor = torch.empty(tuple(shape), dtype=dtype)
    tensor.view(-1).view(torch.uint8).numpy()[:] = source
    return tensor
