"""Parameters in shards: modules that shard themselves, and whole tensors of models."""

from __future__ import annotations

import contextlib

import torch


class FullySharded:
    """Before a module's class: `configure_model` applies FSDP2 layer by layer, and at last to the
    module where weights are tied, whose `training_step` then counts as its forward pass."""

    def configure_model(self):
        from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

        super().configure_model()
        mesh, layers = self.device_mesh["data_parallel"], _layers(self)
        for layer in layers:
            if not isinstance(layer, FSDPModule):
                fully_shard(layer, mesh=mesh)
        own = {p for layer in layers for p in layer.parameters()}
        if not own.issuperset(self.parameters()):
            fully_shard(self, mesh=mesh)
            register_fsdp_forward_method(self, "training_step")


def _layers(module):
    """Those whose parameters are of no other module."""
    leaves = [m for m in module.modules() if m is not module and [*m.parameters(recurse=False)]]
    owners = [p for leaf in leaves for p in leaf.parameters(recurse=False)]
    tied = {p for p in owners if sum(p is other for other in owners) > 1}
    return [leaf for leaf in leaves if not tied.intersection(leaf.parameters(recurse=False))]


def sharded(kind):
    """The class with `FullySharded` before it."""
    return type(kind.__name__, (FullySharded, kind), {"__module__": kind.__module__})


@contextlib.contextmanager
def in_full(model):
    """In which `whole` and `put` reach all of a model's tensors; every rank enters it."""
    if hasattr(model, "summon_full_params"):  # FSDP1's
        with model.summon_full_params(model):
            yield
        return
    for child in model.modules():  # whole parameters that FSDP2 keeps give way to the shards
        if hasattr(child, "unshard"):
            child.reshard()
    yield


def whole(tensor):
    """Of a sharded tensor too; every rank asks for it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def put(tensor, value):
    """A whole value into a tensor or its shards; every rank has it."""
    if hasattr(tensor, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(tensor.dtype), tensor.device_mesh, tensor.placements)
        tensor, value = tensor.to_local(), value.to_local()
    tensor.copy_(value)
