"""Tensors that lie in shards on a learner's ranks: gathered on rank 0 and scattered from it.

Never more in full than the one tensor under way on a rank other than 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dd_lightning.learner import flat_shards
from dd_lightning.learner.flat_shards import flat_shard

if TYPE_CHECKING:
    from dd_lightning.learner.group import Group


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor or FSDP1's."""
    return is_dtensor(tensor) or flat_shard(tensor) is not None


def is_dtensor(tensor: Tensor) -> bool:
    """Of FSDP2 or tensor parallelism. Without importing them, which takes its time."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """Of the whole tensor."""
    flat = flat_shard(tensor)
    return tuple(tensor.shape) if flat is None else flat.shape


def reshard(module: nn.Module) -> None:
    """Give up whole parameters that FSDP keeps after a forward pass: they are to be made anew
    from the shards, which are about to change."""
    for child in module.modules():
        if hasattr(child, "reshard") and hasattr(child, "unshard"):
            child.reshard()
    flat_shards.give_up_whole(module)


def divides_evenly(tensor: Any, group: Group) -> bool:
    """Whether every rank has a slice of its own: what an optimizer keeps in it can travel."""
    return flat_shard(tensor) is not None or _in_rows(tensor, group)


def gather_kept(tensor: Any, local: Tensor, group: Group) -> Tensor | None:
    """As `gather`, of what an optimizer keeps for a parameter that `divides_evenly`.

    Args:
        local: this rank's slice of it; of any device and dtype.
    """
    flat = flat_shard(tensor)
    if flat is not None:
        return flat_shards.gather(local, flat, group)
    return _gather_rows(tensor, local, group)


def scatter_kept(tensor: Any, kept: Any, whole: Tensor | None, group: Group) -> None:
    """As `scatter`, into what an optimizer is to keep for a parameter: `kept` is like it."""
    flat = flat_shard(tensor)
    if flat is not None:
        flat_shards.scatter(kept, flat, whole, group)
    else:
        scatter(kept, whole, group)


def gather(tensor: Any, group: Group) -> Tensor | None:
    """The whole of a sharded parameter in host memory, on rank 0; None on the others."""
    flat = flat_shard(tensor)
    if flat is not None:
        return flat_shards.gather(tensor.detach(), flat, group)
    local = tensor.detach().to_local()
    if not _in_rows(tensor, group):
        whole = tensor.detach().full_tensor()
        return whole.to("cpu", copy=True) if group.leads else None
    return _gather_rows(tensor, local, group)


def _gather_rows(tensor: Any, local: Tensor, group: Group) -> Tensor | None:
    if not group.leads:
        if local.numel():
            group.send(local, 0)
        return None
    whole = torch.empty(tensor.shape, dtype=local.dtype)
    whole[: local.shape[0]].copy_(local)
    for rank in range(1, group.size):
        begin, end = _rows(tensor.shape[0], group.size, rank)
        if _is_empty(tensor, begin, end):
            continue
        if local.device.type == "cpu":
            group.receive(whole[begin:end], rank)
        else:
            shard = local.new_empty((end - begin, *tensor.shape[1:]))
            group.receive(shard, rank)
            whole[begin:end].copy_(shard)
    return whole


def scatter(tensor: Any, whole: Tensor | None, group: Group) -> None:
    """Into a sharded parameter from rank 0, which has it whole (None on the others)."""
    flat = flat_shard(tensor)
    if flat is not None:
        flat_shards.scatter(tensor.detach(), flat, whole, group)
        return
    local = tensor.detach().to_local()
    if not _in_rows(tensor, group):
        _scatter_any(tensor, whole, group)
        return
    if not group.leads:
        if local.numel():
            shard = torch.empty_like(local, memory_format=torch.contiguous_format)
            group.receive(shard, 0)
            local.copy_(shard)
        return
    assert whole is not None  # rank 0 has it
    local.copy_(whole[: local.shape[0]])
    for rank in range(1, group.size):
        begin, end = _rows(tensor.shape[0], group.size, rank)
        if not _is_empty(tensor, begin, end):
            group.send(whole[begin:end].to(local.device, local.dtype), rank)


def _scatter_any(tensor: Any, whole: Tensor | None, group: Group) -> None:
    """Other placements (tensor parallelism, two dimensions): every rank gets it all, keeps its."""
    from torch.distributed.tensor import distribute_tensor

    local = tensor.detach().to_local()
    everything = torch.empty(tensor.shape, dtype=tensor.dtype, device=local.device)
    if whole is not None:
        everything.copy_(whole)
    group.broadcast(everything)
    mine = distribute_tensor(everything, tensor.device_mesh, tensor.placements, src_data_rank=None)
    local.copy_(mine.to_local())


def _in_rows(tensor: Any, group: Group) -> bool:
    """FSDP2's usual layout: dimension 0 divided among all ranks."""
    from torch.distributed.tensor import Shard

    mesh, placements = tensor.device_mesh, tensor.placements
    plain = len(placements) == 1 and type(placements[0]) is Shard and placements[0].dim == 0
    return plain and mesh.size() == group.size


def _rows(num_rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """As torch.chunk divides them."""
    each = -(-num_rows // ranks)
    return min(rank * each, num_rows), min((rank + 1) * each, num_rows)


def _is_empty(tensor: Any, begin: int, end: int) -> bool:
    return begin == end or tensor.numel() == 0
