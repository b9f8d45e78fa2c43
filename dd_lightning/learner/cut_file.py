"""A learner's part of a consistent cut as a file: an ordinary Lightning checkpoint.

What Lightning dumps is taken apart: parameters and optimizer state are copied beside the next step,
all else at once. The file comes to be in one rename, or not at all.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dd_lightning.learner.distributed_files import PARTIAL
from dd_lightning.learner.sharded import is_dtensor


@dataclass(frozen=True, slots=True)
class _Later:
    """Stands for a tensor that is being copied: of a DTensor (`like`), this rank's slice."""

    name: str
    like: Any = None


@dataclass(slots=True)
class TakenApart:
    """`tree`: the checkpoint with placeholders for `later`; `copied_bytes`: what was copied."""

    live: frozenset[int]  # storages of parameters and optimizer state
    tree: Any = None
    later: dict[str, Tensor] = field(default_factory=dict)
    copied_bytes: int = 0
    _names: dict[tuple[Any, ...], str] = field(default_factory=dict)  # one copy of a tied tensor

    @classmethod
    def of(
        cls, checkpoint: Any, module: torch.nn.Module, optimizers: Iterable[Optimizer]
    ) -> TakenApart:
        """Of a checkpoint that still shares its tensors with the module and the optimizers."""
        tensors = list(module.parameters())
        for optimizer in optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, Tensor)]
        parts = cls(frozenset(_slice(tensor).untyped_storage()._cdata for tensor in tensors))
        parts.tree = parts._taken(checkpoint)
        return parts

    def _taken(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            taken = {key: self._taken(item) for key, item in value.items()}
            if type(value) is dict:
                return taken
            whole = copy.copy(value)  # a subclass with its own attributes, such as a state_dict
            whole.update(taken)
            return whole
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._taken(item) for item in value)
        if value is None or isinstance(value, bool | int | float | str | bytes | type):
            return value
        return copy.deepcopy(value)

    def _tensor(self, tensor: Tensor) -> Any:
        own = _slice(tensor)
        storage = own.untyped_storage()._cdata
        if storage not in self.live:
            self.copied_bytes += tensor.nbytes
            return tensor.detach().to("cpu", copy=True)
        place = (storage, own.storage_offset(), tuple(own.shape), own.stride())
        name = self._names.setdefault(place, str(len(self._names)))
        self.later[name] = own
        return _Later(name, None if own is tensor else tensor.detach())


def _slice(tensor: Any) -> Tensor:
    """What this rank has of it, sharing its memory."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor


def put_together(value: Any, copies: Mapping[str, Tensor]) -> Any:
    """The tree with the copies in their places."""
    if isinstance(value, _Later):
        found, like = copies[value.name], value.like
        # as a DTensor that was moved to the CPU, its mesh staying
        return found if like is None else type(like)(found, like._spec, requires_grad=False)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = put_together(item, copies)
        return value
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(put_together(item, copies) for item in value)
    return value


def write_whole(checkpoint: Any, path: Path) -> None:
    """In one rename, after everything is on the disk. Raises OSError; leaves nothing then."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def cut_path(root: Path, learner: str, cut: str) -> Path:
    """`ROOT/cuts/ID.ckpt` where the root is this learner's own, as the launcher gives it
    (`learners/<id>`); else a folder for each learner, since several may share a root."""
    folder = root / "cuts"
    return (folder if root.name == learner else folder / learner) / f"{cut}.ckpt"
