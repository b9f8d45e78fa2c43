"""The tensors of a module that travel: their layout, copies of them, and applying Θ in place."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from dd_lightning.algorithm import average_rule_names, canonical_name, dtype_name
from dd_lightning.learner.sharded import full_shape, is_sharded
from dd_lightning.protocol.messages import TensorInfo

_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class ModelValues:
    """`Values` of the ledger for a module of one process (of a group: `group_values.py`).

    Trainable parameters, tied ones once under their first name; persistent finite float buffers,
    which are read only once they differ from what they were when this was made.

    Raises:
        ValueError: no trainable parameter, or one of a dtype that cannot travel.
    """

    def __init__(self, module: nn.Module) -> None:
        self._tensors: dict[str, Tensor] = {}  # parameters
        self._owners: dict[str, tuple[nn.Module, str]] = {}  # of buffers, which may be replaced
        self._local = {n for n, p in module.named_parameters() if not p.requires_grad}
        self._module = module
        self._fragments: tuple[tuple[str, ...], ...] = ()
        self._original: dict[str, Tensor] = {}  # buffers that have not changed yet
        embeddings = average_rule_names(module, None)
        self.infos = (*self._parameters(module, embeddings), *self._buffers(module))
        self.buffers = frozenset(self._original)
        self._shapes = {info.name: info.shape for info in self.infos}

    def _parameters(self, module: nn.Module, embeddings: set[str]) -> list[TensorInfo]:
        infos, seen = [], set()
        for raw_name, parameter in module.named_parameters():
            name, place = canonical_name(raw_name), _place(parameter)
            if not parameter.requires_grad or place in seen:
                continue
            if parameter.dtype not in _FLOATS:
                raise ValueError(
                    f"parameter {name} is {parameter.dtype}; allowed: float32, float64, float16, "
                    "bfloat16. Freeze it (requires_grad=False) to keep it local."
                )
            seen.add(place)
            self._tensors[name] = parameter
            kind = "embedding" if name in embeddings else "parameter"
            infos.append(TensorInfo(name, full_shape(parameter), kind))
        if not infos:
            raise ValueError(
                "the module has no trainable parameter; unfreeze what is to be trained."
            )
        return infos

    def _buffers(self, module: nn.Module) -> list[TensorInfo]:
        infos = []
        for prefix, child in module.named_modules():
            first = next(
                (
                    canonical_name(f"{prefix}.{name}" if prefix else name)
                    for name, parameter in child.named_parameters(recurse=False)
                    if parameter.requires_grad
                ),
                "",
            )
            for local_name, buffer in child.named_buffers(recurse=False):
                name = canonical_name(f"{prefix}.{local_name}" if prefix else local_name)
                local = local_name in child._non_persistent_buffers_set
                if local or buffer.dtype not in _FLOATS or not bool(buffer.isfinite().all()):
                    continue
                self._owners[name] = (child, local_name)
                self._original[name] = buffer.detach().clone()
                module_name = first if first in self._tensors else ""
                infos.append(TensorInfo(name, tuple(buffer.shape), "buffer", module_name))
        return infos

    @property
    def main_dtype(self) -> str:
        """Dtype of most parameters' elements, as a join states it."""
        counts: dict[torch.dtype, int] = {}
        for tensor in self._tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(full_shape(tensor))
        return dtype_name(max(counts, key=lambda dtype: counts[dtype]))

    def place(self, fragments: Sequence[Sequence[str]]) -> None:
        """Take the run's fragments, lists of names."""
        self._fragments = tuple(tuple(names) for names in fragments)

    def dtype(self, name: str) -> torch.dtype:
        """Dtype in which the module holds it."""
        return self._tensor(name).dtype

    def warn_of_unfrozen(self) -> None:
        """Once per parameter that was frozen at the join and is trained now: it stays local."""
        if not self._local:
            return
        found = [n for n, p in self._module.named_parameters() if p.requires_grad]
        names = sorted(self._local.intersection(found))
        self._local.difference_update(names)
        if names:
            warnings.warn(
                f"{len(names)} parameters were frozen when this learner joined and are trained "
                f"now ({', '.join(names[:3])}): they are not merged, so learners drift apart in "
                "them. Unfreeze what is to be trained before fit, or train it in a run of its own.",
                stacklevel=2,
            )

    def read(self, fragment: int) -> dict[str, Tensor]:
        """Copies in host memory: parameters, and the buffers that have changed."""
        return {name: self._copy(name) for name in self._fragments[fragment] if self._moves(name)}

    def read_whole(self, fragment: int) -> dict[str, Tensor]:
        """As `read`, with every buffer (version 0 of a run)."""
        return {name: self._copy(name) for name in self._fragments[fragment]}

    @torch.no_grad()
    def write(self, fragment: int, tensors: Mapping[str, Tensor]) -> None:
        """Copy into place, so that whatever shares the storage stays shared."""
        for name in self._fragments[fragment]:
            if name in tensors:
                self._tensor(name).copy_(tensors[name])

    def _tensor(self, name: str) -> Tensor:
        """Parameters keep their place; `self.average = ...` gives a module another buffer.

        Raises:
            RuntimeError: a buffer has another shape than at the join.
        """
        if name in self._tensors:
            return self._tensors[name]
        module, local_name = self._owners[name]
        buffer = module._buffers[local_name]
        shape = None if buffer is None else tuple(buffer.shape)
        if buffer is None or shape != self._shapes[name]:
            raise RuntimeError(
                f"buffer {name} had shape {self._shapes[name]} when this learner joined and has "
                f"{shape} now. Register it with persistent=False to keep it local, or run with "
                "algorithm.buffers=false."
            )
        return buffer

    def _copy(self, name: str) -> Tensor:
        return self._tensor(name).detach().to("cpu", copy=True).contiguous()

    def _moves(self, name: str) -> bool:
        original = self._original.get(name)
        if original is None:
            return True
        # equal() has no meaning for it once the values are not finite: it then counts as changed
        now = self._tensor(name)
        changed = not torch.equal(original.to(now.device), now)
        if changed:
            del self._original[name]
        return changed


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two parameters that are one tensor in memory."""
    if is_sharded(tensor):
        return (id(tensor),)
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
    )
