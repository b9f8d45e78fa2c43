"""Puts Θ from a syncer's checkpoint into the task's module, in place and by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from dd_lightning.algorithm import canonical_name


def load_theta(module: nn.Module, theta: Mapping[str, Tensor]) -> None:
    """Copy Θ into the parameters and buffers of its names; what Θ lacks (frozen, local) stays.

    In place, so tied parameters stay tied.

    Args:
        theta: by canonical name, as `syncer.checkpoint.load_parameters` returns it.

    Raises:
        ValueError: the module lacks a tensor of Θ, or has it in another shape.
    """
    own = dict(_tensors(module))
    for name, value in theta.items():
        if name not in own:
            raise ValueError(
                f"the checkpoint holds {name}, which the module {type(module).__name__} does not "
                "have; give the module (and its settings) that the learners trained."
            )
        if own[name].shape != value.shape:
            raise ValueError(
                f"the checkpoint holds {name} in shape {tuple(value.shape)}, the module "
                f"{type(module).__name__} has {tuple(own[name].shape)}; give it the settings of "
                "the learners' module."
            )
    with torch.no_grad():
        for name, value in theta.items():
            own[name].copy_(value)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in module.named_parameters(remove_duplicate=False):
        yield canonical_name(name), tensor
    for name, tensor in module.named_buffers(remove_duplicate=False):
        yield canonical_name(name), tensor
