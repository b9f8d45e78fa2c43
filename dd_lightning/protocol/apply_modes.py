"""How an arrived fragment changes what a learner holds: overwrite, rebase, mix (`protocol.md`).

Tensors only; the counters that go with each mode are the ledger's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


def rebased(
    current: Tensors, base: Tensors, arrived: Tensors, buffers: Collection[str] = ()
) -> dict[str, Tensor]:
    """Θ + (θ − base), the learner's own work since `base` on top of what has arrived.

    Buffers (running statistics, whose difference may leave their range) and tensors that `base`
    lacks are taken as they arrived.
    """
    return {
        name: new
        if name in buffers or name not in base
        else _wide(new) + (_wide(current[name]) - _wide(base[name]))
        for name, new in arrived.items()
    }


def mixed(current: Tensors, arrived: Tensors, alpha: float) -> dict[str, Tensor]:
    """αθ + (1−α)Θ; `alpha` is the share of the learner's own values, 0 to 1."""
    return {
        name: alpha * _wide(current[name]) + (1.0 - alpha) * _wide(new)
        for name, new in arrived.items()
    }


def _wide(tensor: Tensor) -> Tensor:
    """At least float32: differences of 16-bit values are not taken in 16 bits."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(torch.float32)
