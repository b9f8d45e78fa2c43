"""Our strategy over FSDP1 (`FullyShardedDataParallel`)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.precision import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.optim import Optimizer

from dd_lightning.learner.distributed_files import replaced
from dd_lightning.learner.divides_data import DividesData


class FSDPLearner(DividesData, FSDPStrategy):
    """`inner="fsdp"`. On CPUs too, which Lightning itself refuses for FSDP (for trying things out),
    and with `gradient_clip_val` by norm, which Lightning refuses with it."""

    @property
    def _is_group(self) -> bool:
        return True  # of one process too, which FSDP wraps as well

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if self._state_dict_type != "sharded":
            super()._write(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        with replaced(path, leads=self.is_global_zero, barrier=self.barrier) as partial:
            super()._write(checkpoint, partial, storage_options)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        root = self._wrap(model)
        plugin = self.precision_plugin
        if type(plugin).clip_grad_by_norm is FSDPPrecision.clip_grad_by_norm:
            plugin.clip_grad_by_norm = functools.partial(clip_by_norm, root)  # type: ignore[method-assign]
        return root

    def _wrap(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        wrapped = any(isinstance(child, FullyShardedDataParallel) for child in model.modules())
        if wrapped or self.root_device.type != "cpu":
            return super()._setup_model(model)
        if self.cpu_offload is not None and self.cpu_offload.offload_params:
            raise ValueError(
                "cpu_offload is on for a learner on CPUs, where torch cannot do it; allowed: off "
                "there, on with GPUs."
            )
        whole = FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,  # Lightning gives its index, which a CPU has not
            **self.kwargs,
        )
        options = self.kwargs
        # Lightning does the rest; that the module is wrapped is then no surprise
        self.kwargs = {name: one for name, one in options.items() if name != "auto_wrap_policy"}
        try:
            return super()._setup_model(whole)
        finally:
            self.kwargs = options

    @contextlib.contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """In which `configure_model` may `wrap` units of its own."""
        if self.root_device.type != "cpu":
            with super().model_sharded_context():
                yield
            return
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import enable_wrap

        with enable_wrap(
            wrapper_cls=FullyShardedDataParallel,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        ):
            yield


def clip_by_norm(root: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
    """By FSDP's own way: one norm over all parameters, whose gradients lie in shards.

    Raises:
        ValueError: the optimizer has only some of them, or they are not under one root.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    its = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not isinstance(root, FullyShardedDataParallel) or any(
        parameter.requires_grad and parameter not in its for parameter in root.parameters()
    ):
        raise ValueError(
            f"gradient_clip_val is {clip_val} under FSDP, which clips all parameters of one root "
            "together; allowed: one optimizer of every trainable parameter, and no units made in "
            'the module itself. Else clip by value (gradient_clip_algorithm="value").'
        )
    root.clip_grad_norm_(clip_val)
