"""Outer gradients: what a learner moved, as old global minus local, anchored at the current global.

All results are float32, or float64 where an input is; 16-bit inputs are widened before arithmetic.
"""

import torch
from torch import Tensor


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Return float64 if any of the tensors is float64, else float32."""
    is_double = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if is_double else torch.float32


def outer_gradient(global_: Tensor, local: Tensor) -> Tensor:
    """Return global_ - local (any shape, the same for both); descent direction is its negative.

    Raises:
        ValueError: the shapes differ.
    """
    global_, local = _same_shape("global_", global_, "local", local)
    dtype = compute_dtype(global_, local)
    return global_.to(dtype) - local.to(dtype)


def reanchored(
    current: Tensor, base: Tensor, local: Tensor, local_dtype: torch.dtype | None = None
) -> Tensor:
    """Return v = (current - base) + (cast(base) - local): the move of a 16-bit learner.

    The second bracket starts from what the learner really held, `base` cast to its dtype; with
    the uncast base the rounding of the cast would look like an outer gradient.

    Args:
        current: the syncer's fragment now. Pass the same object as `base` where the version has
            not changed: the first bracket is then not computed and v is bitwise the second.
        base: the syncer's fragment at the version that the learner started from.
        local: the learner's values.
        local_dtype: dtype of the learner's parameters; default: that of `local`.

    Raises:
        ValueError: the shapes differ.
    """
    held = base.to(local.dtype if local_dtype is None else local_dtype)
    delta = outer_gradient(held, local).to(compute_dtype(current, base, local))
    return from_delta(current, base, delta)


def from_delta(current: Tensor, base: Tensor, delta: Tensor) -> Tensor:
    """Return v = (current - base) + delta, with delta = base - local as it came over the wire.

    `current` and `base` as in `reanchored`: one object for both gives `delta`, widened only.

    Raises:
        ValueError: the shapes differ.
    """
    _same_shape("base", base, "delta", delta)
    dtype = compute_dtype(current, base, delta)
    if current is base:
        return delta.to(dtype)
    return outer_gradient(current, base).to(dtype) + delta.to(dtype)


def _same_shape(name_a: str, a: Tensor, name_b: str, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape:
        raise ValueError(
            f"{name_a} has shape {tuple(a.shape)}, {name_b} {tuple(b.shape)}; they must be equal. "
            "Learner and syncer hold different models: compare their layouts."
        )
    return a, b
