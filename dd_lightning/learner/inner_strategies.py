"""Our strategy over each of Lightning's: what they need beyond the hooks of `strategy.py`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

from dd_lightning.learner.inner import ALL_DATA_PARALLEL
from dd_lightning.learner.sampler import sampler_kwargs
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class _DividesData(DecoupledDiLoCoStrategy):
    """Of the strategies whose sampler Lightning replaces by its `DistributedSampler`."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        inner = super().distributed_sampler_kwargs  # type: ignore[misc] (Lightning's own class)
        session = self._session
        welcome = None if session is None else session.welcome
        if session is None or welcome is None or session.is_alone:
            return inner
        return sampler_kwargs(
            inner,
            self.data,
            training=self._trainer.training,
            slot=welcome.data_slot,
            slots=welcome.num_data_slots,
            seed=session.config.seed,
        )


class DDPLearner(_DividesData, DDPStrategy):
    """`inner="auto"` or "ddp". One process has neither a process group nor a wrapped module, and
    is what it would be on a single device."""

    @property
    def inner_name(self) -> str:
        return super().inner_name if self._is_group else SingleDeviceStrategy.__name__

    @property
    def _is_group(self) -> bool:
        return self.num_nodes * self.num_processes > 1

    def _configure_launcher(self) -> None:
        if self._is_group:
            super()._configure_launcher()
        else:
            self._launcher = None

    def setup_distributed(self) -> None:
        if self._is_group:
            super().setup_distributed()
        else:
            self.set_world_ranks()  # no reset of the seed: as on a single device

    def setup(self, trainer: Any) -> None:
        if self._is_group:
            super().setup(trainer)
        else:
            Strategy.setup(self, trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return super()._setup_model(model) if self._is_group else model

    def _leave_sampler_alone(self, trainer: Any) -> None:
        if not self._is_group:  # ranks of a group never see the same samples
            trainer._accelerator_connector.use_distributed_sampler = False


class ModelParallelLearner(_DividesData, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as the module's `configure_model` applies them.

    `inner="fsdp2"`: all ranks are one data-parallel dimension.
    """

    def setup_environment(self) -> None:
        if getattr(self, ALL_DATA_PARALLEL, False):
            self._data_parallel_size = self.num_nodes * self.num_processes
            self._tensor_parallel_size = 1
        super().setup_environment()

    @property
    def _is_group(self) -> bool:
        return True  # of one process too: its parameters are sharded tensors

    @property
    def _counts_tokens(self) -> bool:
        return self.device_mesh["tensor_parallel"].get_local_rank() == 0


class OneDeviceStrategy(DecoupledDiLoCoStrategy, SingleDeviceStrategy):
    """`inner="single_device"`: the sampler is never Lightning's, so `data` has no effect."""

    def model_to_device(self) -> None:
        super().model_to_device()
        if self.data == "shard" and self._session is not None and not self._session.is_alone:
            warnings.warn(
                'data="shard" has no effect under inner="single_device", where Lightning replaces '
                'no sampler: use inner="auto", or give each learner its own part of the data.',
                stacklevel=2,
            )


_CLASSES: dict[type[Strategy], type[DecoupledDiLoCoStrategy]] = {
    DDPStrategy: DDPLearner,
    ModelParallelStrategy: ModelParallelLearner,
    SingleDeviceStrategy: OneDeviceStrategy,
}


def class_over(inner: type[Strategy]) -> type[DecoupledDiLoCoStrategy]:
    """Our class over one of Lightning's."""
    return _CLASSES[inner]
