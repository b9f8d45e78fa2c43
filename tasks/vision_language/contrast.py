"""InfoNCE over a group of processes, and retrieval both ways.

Shape suffixes: B pairs of this rank, R ranks, N candidates, E features. Features have length 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def group_size() -> int:
    """Ranks of the learner; its process group is torch's default one, alone it has none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def group_rank() -> int:
    """Place of this process in `gather`'s result."""
    return dist.get_rank() if group_size() > 1 else 0


class _Gather(torch.autograd.Function):
    """Every rank's tensor; its gradient is the sum of what all ranks have for it.

    torch.distributed.nn.functional.all_gather does this too, but is deprecated.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        ctx.rows = tensor.shape[0]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.narrow(0, dist.get_rank() * ctx.rows, ctx.rows)


def gather(tensor: Tensor) -> Tensor:
    """All ranks' `[B, ...]` as `[R * B, ...]`, by rank, with gradient; B is the same on all."""
    return _Gather.apply(tensor) if group_size() > 1 else tensor


def info_nce(picture_BE: Tensor, text_BE: Tensor, scale: Tensor, name_B: Tensor) -> Tensor:
    """Symmetric InfoNCE (Radford et al. 2021) of this rank's pairs among those of all ranks, nats.

    The mean over ranks is the loss of one process with all pairs, and so is its gradient after the
    averaging of data parallelism.

    Args:
        scale: inverse temperature.
        name_B: equal for pairs of the same name, which are no wrong answers for each other.
    """
    both = gather(torch.cat((picture_BE, text_BE), dim=1))
    pictures_NE, texts_NE = both.chunk(2, dim=1)
    name_N = gather(name_B)
    first = group_rank() * len(name_B)
    own = torch.arange(first, first + len(name_B), device=name_B.device)
    same_BN = name_B[:, None] == name_N[None]
    same_BN = same_BN & (own[:, None] != torch.arange(len(name_N), device=name_B.device))
    losses = [
        F.cross_entropy((scale * ours @ theirs.T).masked_fill(same_BN, -torch.inf), own)
        for ours, theirs in ((picture_BE, texts_NE), (text_BE, pictures_NE))
    ]
    return (losses[0] + losses[1]) / 2


def recalls(scores_NN: Tensor, ks: Iterable[int]) -> dict[int, float]:
    """Share of rows, and of columns, whose own partner (the diagonal) is among the k highest
    scores: the mean of both. A partner that ties with another, or is NaN, counts as the lower."""
    own_N = scores_NN.diagonal()
    found = {}
    by_row = (~(scores_NN < own_N[:, None])).sum(1) - 1  # others that are not below
    by_column = (~(scores_NN < own_N[None])).sum(0) - 1
    for k in ks:
        hits = torch.cat((by_row < k, by_column < k))
        found[k] = hits.float().mean().item()
    return found
