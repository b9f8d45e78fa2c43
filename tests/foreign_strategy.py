"""A strategy of no kind that we know: Lightning's bare minimum, one process."""

from __future__ import annotations

import torch
from lightning.pytorch.strategies import Strategy


class Foreign(Strategy):
    """Everything on the CPU."""

    root_device = torch.device("cpu")
    is_global_zero = True
    global_rank, world_size = 0, 1  # as Lightning asks, though its base class has neither

    def model_to_device(self):
        self.model.to(self.root_device)

    def all_gather(self, tensor, group=None, sync_grads=False):
        return tensor

    def barrier(self, name=None):
        pass

    def broadcast(self, obj, src=0):
        return obj

    def reduce(self, tensor, *args, **kwargs):
        return tensor
