"""Weighted sums and norms of tensors in float64, in pieces that stay in the processor's cache.

Widening a whole tensor first is bound by memory: ten times as slow, and twice its size. Every
element goes through the same operations in the same order whatever the pieces; norms add up the
pieces' squares in order, so they are the same at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

CHUNK = 1 << 17  # elements; two float64 buffers of it take 2 MiB


def squared_norm(tensor: Tensor) -> float:
    """Sum of squares over all elements."""
    return _squares(_widened(tensor))


def norm(tensor: Tensor) -> float:
    """Euclidean norm over all elements."""
    return math.sqrt(squared_norm(tensor))


def sum_norm(tensors: Sequence[Tensor], factors: Sequence[float]) -> float:
    """Norm of sum(factor * tensor), which is never held whole."""
    return math.sqrt(_squares(_sums(tensors, factors)))


def scaled_sum(
    tensors: Sequence[Tensor],
    factors: Sequence[float],
    finish: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Tensor:
    """Return finish(sum(factor * tensor)) as `dtype`, rounded once; shapes are equal.

    Args:
        finish: changes a piece of the float64 sum in place and returns it, element by element.
    """
    result = torch.empty(tensors[0].shape, dtype=dtype, device=tensors[0].device)
    parts = result.view(-1).split(CHUNK)
    for part, total in zip(parts, _sums(tensors, factors), strict=True):
        part.copy_(finish(total))
    return result


def _squares(pieces: Iterator[Tensor]) -> float:
    return sum(float(torch.dot(piece, piece)) for piece in pieces)


def _widened(tensor: Tensor) -> Iterator[Tensor]:
    """Pieces in float64; each is overwritten by the next."""
    flat = tensor.reshape(-1)
    wide = flat.new_empty(min(CHUNK, flat.numel()), dtype=torch.float64)
    for piece in flat.split(CHUNK):
        yield wide[: piece.numel()].copy_(piece)


def _sums(tensors: Sequence[Tensor], factors: Sequence[float]) -> Iterator[Tensor]:
    """Pieces of sum(factor * tensor); product and sum round separately (no FMA)."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    total = flat[0].new_empty(min(CHUNK, flat[0].numel()), dtype=torch.float64)
    term = torch.empty_like(total)
    for first, *others in zip(*(one.split(CHUNK) for one in flat), strict=True):
        summed = total[: first.numel()].copy_(first).mul_(factors[0])
        for piece, factor in zip(others, factors[1:], strict=True):
            summed.add_(term[: piece.numel()].copy_(piece).mul_(factor))
        yield summed
