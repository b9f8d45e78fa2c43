"""The inner optimizers' state as named tensors and numbers, and back.

Any torch optimizer whose state is tensors and plain numbers per parameter (SGD, Adam and AdamW with
`step` and amsgrad, Adafactor, ...). Options of the groups (lr, betas) are never taken over.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dd_lightning.algorithm import canonical_name
from dd_lightning.learner.sharded import full_shape, is_dtensor, is_sharded
from dd_lightning.protocol.transfer import MOST_ENTRIES, SIZES, Entry, TransferError

_SHAPING = ("amsgrad", "centered", "nesterov")  # options that decide which entries there are
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SIZES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class InnerState:
    """Reads and writes the state of a module's optimizers by canonical parameter names."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        names = {parameter: canonical_name(name) for name, parameter in module.named_parameters()}
        self._parameters: dict[tuple[int, str], tuple[nn.Parameter, dict[str, Any]]] = {}
        self.why_not = "" if sys.byteorder == "little" else "this machine is not little-endian"
        for index, optimizer in enumerate(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter not in names:
                        self.why_not = "an optimizer has a parameter that the module does not name"
                        continue
                    self._parameters[index, names[parameter]] = (parameter, group)

    @property
    def description(self) -> str:
        """Digest of what two learners must have in common; "" where the state cannot travel."""
        if self.why_not:
            return ""
        rows = [
            [
                index, name, type(self._optimizers[index]).__qualname__,
                list(full_shape(parameter)), str(parameter.dtype),
                *(bool(group.get(option)) for option in (*_SHAPING, "momentum")),
            ]
            for (index, name), (parameter, group) in sorted(
                self._parameters.items(), key=lambda item: item[0]
            )
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def entries(self) -> dict[Entry, Tensor]:
        """The state now: tensors as they are (not copied), numbers as tensors of one element; of a
        sharded parameter, this rank's slices.

        Raises:
            TransferError: a part of it is neither a tensor nor a number, or not in slices as its
                parameter is.
        """
        found: dict[Entry, Tensor] = {}
        for (index, name), (parameter, _) in self._parameters.items():
            for key, value in self._optimizers[index].state.get(parameter, {}).items():
                if value is None:
                    continue
                number = isinstance(value, int | float)
                if number:
                    kind = torch.float64 if isinstance(value, float) else torch.int64
                    value = torch.tensor(value, dtype=kind)
                dtype = _NAMES.get(value.dtype) if isinstance(value, Tensor) else None
                if dtype is None:
                    what = type(value).__name__
                    raise TransferError(f"{name}, {key}: a {what} of an optimizer cannot travel")
                shape = tuple(value.shape)
                if is_sharded(parameter) and value.shape == parameter.shape:
                    shape, value = full_shape(parameter), _slice(value)
                elif is_sharded(parameter) and (value.numel() > 1 or is_sharded(value)):
                    raise TransferError(f"{name}, {key}: not in shards as its parameter is")
                found[Entry(index, name, str(key), dtype, shape, number)] = value
        return found

    def fits(self) -> _Fit:
        """Checks the entries of one transfer as they come."""
        return _Fit({key: full_shape(p) for key, (p, _) in self._parameters.items()})

    @torch.no_grad()
    def load(self, entries: Mapping[Entry, bytearray]) -> None:
        """Replace the whole state; the bytes become the tensors where they lie on the CPU.

        Raises:
            TransferError: a value is not finite. Nothing is changed then.
        """
        self.replace({entry: finite_tensor(entry, data) for entry, data in entries.items()})

    def replace(self, tensors: Mapping[Entry, Tensor]) -> None:
        """The whole state by these tensors: whole ones, or this rank's slices."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for entry, tensor in tensors.items():
            parameter, group = self._parameters[entry.optimizer, entry.parameter]
            state = self._optimizers[entry.optimizer].state[parameter]
            on_device = entry.key != "step" or group.get("capturable") or group.get("fused")
            if entry.number:
                state[entry.key] = tensor.item()
            else:
                state[entry.key] = tensor.to(parameter.device) if on_device else tensor


class _Fit:
    """Whether an entry is of a parameter of ours, and no larger than an optimizer needs for it."""

    def __init__(self, shapes: Mapping[tuple[int, str], tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._counts: Counter[tuple[int, str]] = Counter()

    def __call__(self, entry: Entry) -> None:
        """Raises TransferError for one that does not fit."""
        what = f"{entry.parameter}, {entry.key}"
        shape = self._shapes.get((entry.optimizer, entry.parameter))
        if shape is None:
            raise TransferError(f"{what}: not a parameter of this learner")
        self._counts[entry.optimizer, entry.parameter] += 1
        if self._counts[entry.optimizer, entry.parameter] > MOST_ENTRIES:
            raise TransferError(f"{what}: more than {MOST_ENTRIES} entries")
        entry.num_bytes  # noqa: B018 (raises for a dtype that cannot travel)
        numel = torch.Size(shape).numel()  # factored states are smaller, none is larger
        if entry.length > 1 and entry.shape != shape and entry.length >= numel:
            raise TransferError(f"{what} has shape {entry.shape}, its parameter {shape}")
        if entry.number and (entry.shape != () or entry.dtype not in ("int64", "float64")):
            raise TransferError(f"{what}: {entry.dtype} {entry.shape} is not a number")


def raw_bytes(tensor: Tensor) -> memoryview:
    """The elements of a tensor on the CPU, shared with it where it is contiguous."""
    flat = tensor.contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")


def dtype_of(entry: Entry) -> torch.dtype:
    """Of its tensor."""
    return _DTYPES[entry.dtype]


def finite_tensor(entry: Entry, data: bytearray) -> Tensor:
    """On the CPU, sharing the bytes. Raises TransferError where a value is not finite."""
    dtype = _DTYPES[entry.dtype]
    if not data:
        return torch.empty(entry.shape, dtype=dtype)
    tensor = torch.frombuffer(data, dtype=dtype).reshape(entry.shape)
    if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
        raise TransferError(f"{entry.parameter}, {entry.key} is not finite")
    return tensor


def _slice(value: Tensor) -> Tensor:
    """What this rank has of it."""
    return value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
