"""FSDP1's parameters: parts of their unit's one flat parameter, of which every rank has a slice.

They are read and written slice by slice. No unit is made whole for it, so a fragment may be any
set of tensors and rank 0 holds no more than that fragment in full, the others nothing.

Of torch's own names this needs `FullyShardedDataParallel._handle` and the flat parameter's
metadata (torch 2.13 and 2.14); the public way, `summon_full_params`, makes every rank hold units.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dd_lightning.algorithm import canonical_name

if TYPE_CHECKING:
    from dd_lightning.learner.group import Group

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"
_MARK = "_dd_flat_shard"  # attribute of a parameter


@dataclass(frozen=True, slots=True)
class FlatShard:
    """Where the elements of one parameter lie."""

    shape: tuple[int, ...]  # of the whole
    strides: tuple[int, ...]  # of the whole as it was flattened
    slices: tuple[tuple[int, int], ...]  # of every rank: first element, and that after the last

    @property
    def sources(self) -> tuple[int, ...]:
        """Ranks whose slices make the whole; a replica's (HYBRID_SHARD) are not among them.

        Raises:
            ValueError: slices do not lie one after another.
        """
        ranks, end = [], 0
        for rank, (first, after) in sorted(enumerate(self.slices), key=lambda item: item[1]):
            if first == end and after > first:
                ranks.append(rank)
                end = after
        if end != math.prod(self.shape):
            raise ValueError(
                f"slices {self.slices} of a parameter of shape {self.shape} leave parts out; "
                "allowed: units that are sharded over the ranks of one learner."
            )
        return tuple(ranks)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Memory for it, on the CPU."""
        return torch.empty_strided(self.shape, self.strides, dtype=dtype)

    def flat(self, whole: Tensor) -> Tensor:
        """Its elements in the order of the slices; a view where they lie in that order."""
        if whole.stride() != self.strides:
            whole = self.whole(whole.dtype).copy_(whole)
        return whole.as_strided((whole.numel(),), (1,))


def flat_shard(tensor: Any) -> FlatShard | None:
    """Of a parameter that FSDP1 has in shards."""
    return getattr(tensor, _MARK, None)


def mark(root: nn.Module, group: Group) -> None:
    """Let `flat_shard` know every sharded parameter under `root`; all ranks call it.

    Raises:
        ValueError: parameters that do not keep their names and shapes, or lie in two units.
    """
    parameters: list[tuple[nn.Parameter, torch.Size, tuple[int, ...]]] = []
    numbers: list[int] = []
    for unit in _units(root):
        _check(unit)
        flat = unit._handle.flat_param
        if not unit._handle.uses_sharded_strategy:
            continue  # every rank has whole parameters, in place
        rows = zip(flat._params, flat._shapes, flat._strides, flat._shard_param_infos, strict=True)
        for parameter, shape, strides, place in rows:
            parameters.append((parameter, shape, strides))
            first = place.intra_param_start_idx if place.in_shard else 0
            numbers += [first, first + place.numel_in_shard if place.in_shard else 0]
    _check_owners(root)
    if not parameters:
        return
    table = group.all_gather(numbers)
    for index, (parameter, shape, strides) in enumerate(parameters):
        slices = tuple((row[2 * index], row[2 * index + 1]) for row in table)
        shard = FlatShard(tuple(shape), tuple(strides), slices)
        assert len(shard.sources) > 0 or math.prod(shape) == 0  # raises where parts are left out
        setattr(parameter, _MARK, shard)


def give_up_whole(root: nn.Module) -> None:
    """Units that a forward pass has left whole: they are to be made anew from the shards."""
    if _FSDP1 not in sys.modules:
        return
    from torch.distributed.fsdp._runtime_utils import _reshard

    for unit in _units(root):
        handle = unit._handle
        if unit._is_root is None or not handle.uses_sharded_strategy:
            continue  # before the first forward pass there is nothing to give up
        if not handle.needs_unshard() or handle._skipped_use_sharded_views:
            _reshard(unit, handle, True)


def gather(local: Tensor, shard: FlatShard, group: Group) -> Tensor | None:
    """The whole in host memory, on rank 0; None on the others.

    Args:
        local: this rank's slice, of a parameter or of what an optimizer keeps in its shape.
    """
    if not group.leads:
        if group.rank in shard.sources:
            group.send(local, 0)
        return None
    whole = shard.whole(local.dtype)
    flat = shard.flat(whole)
    for rank in shard.sources:
        piece = flat[slice(*shard.slices[rank])]
        if rank == 0:
            piece.copy_(local)
        elif local.device.type == "cpu":
            group.receive(piece, rank)
        else:
            on_device = local.new_empty(piece.shape)
            group.receive(on_device, rank)
            piece.copy_(on_device)
    return whole.contiguous()


def scatter(local: Tensor, shard: FlatShard, whole: Tensor | None, group: Group) -> None:
    """Into every rank's slice from rank 0, which has it whole (None on the others)."""
    if not group.leads:
        if local.numel():
            group.receive(local, 0)
        return
    assert whole is not None  # rank 0 has it
    flat = shard.flat(whole)
    for rank, (first, after) in enumerate(shard.slices):
        piece = flat[first:after]
        if rank == 0:
            local.copy_(piece)
        elif after > first:
            group.send(piece.to(local.device, local.dtype), rank)


def _units(root: nn.Module) -> Iterator[Any]:
    """FSDP1's units that have parameters of their own."""
    if _FSDP1 not in sys.modules:  # not imported for this: it takes its time
        return
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in FullyShardedDataParallel.fsdp_modules(root):
        if module._handle is not None:
            yield module


def _check(unit: Any) -> None:
    if not unit._use_orig_params:
        raise ValueError(
            "a unit of FSDP has use_orig_params=False, which hides its parameters' names and "
            "shapes; allowed: True, as `FSDPStrategy()` has it."
        )
    if any(extension is not None for extension in unit._handle.flat_param._param_extensions):
        raise ValueError(
            'FSDP over tensor-parallel parameters cannot be a learner; use inner="fsdp2" '
            "(ModelParallelStrategy), which has both."
        )


def _check_owners(root: nn.Module) -> None:
    """Every flattened parameter is where its one unit put it."""
    owners = set()
    for unit in _units(root):
        flat = unit._handle.flat_param
        for info in (*flat._param_infos, *flat._shared_param_infos):
            owners.add((id(info.module), info.param_name))
    for prefix, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if not getattr(parameter, "_fsdp_flattened", False) or name == "_flat_param":
                continue
            if (id(module), name) not in owners:
                full = canonical_name(f"{prefix}.{name}")
                raise ValueError(
                    f"parameter {full} was flattened into an FSDP unit that does not hold "
                    "this module: it is tied to a parameter of another unit, or left from an "
                    "earlier fit. Let auto_wrap_policy keep tied modules in one unit, and give "
                    "every fit a new module (or wrap it in `configure_model`)."
                )
