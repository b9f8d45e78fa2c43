"""Lightning's own strategies for groups of two CPUs: what a learner is compared with."""

from __future__ import annotations

import warnings

from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.conformance.ranks import RANKS


class PlainFSDP(FSDPStrategy):
    """On CPUs, which Lightning itself refuses. Clips as FSDP does, which Lightning refuses too."""

    def _setup_model(self, model):
        options = {"mixed_precision": self.mixed_precision_config, **self.kwargs}
        root = FullyShardedDataParallel(model, device_id=self.root_device, **options)
        self.precision_plugin.clip_grad_by_norm = lambda _, most: root.clip_grad_norm_(most)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is wrapped already
            return super()._setup_model(root)


def plain_strategy(inner):
    """By the name of the column."""
    if inner == "fsdp":
        return PlainFSDP()
    if inner == "fsdp2":
        return ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    return inner
