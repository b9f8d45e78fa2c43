"""Our strategy over each of Lightning's: what they need beyond the hooks of `strategy.py`."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.optim import Optimizer

from dd_lightning.learner.distributed_files import replaced
from dd_lightning.learner.divides_data import DividesData
from dd_lightning.learner.inner import ALL_DATA_PARALLEL, known_class
from dd_lightning.learner.inner_fsdp import FSDPLearner
from dd_lightning.learner.inner_unknown import UnknownLearner, UnknownParallelLearner
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class DDPLearner(DividesData, DDPStrategy):
    """`inner="auto"` or "ddp". One process has neither a process group nor a wrapped module, and
    is what it would be on a single device. A user's own class always has them: what it overrides
    is to run."""

    _always_group = False

    @property
    def inner_name(self) -> str:
        return super().inner_name if self._is_group else SingleDeviceStrategy.__name__

    @property
    def _is_group(self) -> bool:
        return self._always_group or self.num_nodes * self.num_processes > 1

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


class ModelParallelLearner(DividesData, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as the module's `configure_model` applies them.

    `inner="fsdp2"`: all ranks are one data-parallel dimension.
    """

    _in_place = False

    def setup_environment(self) -> None:
        if getattr(self, ALL_DATA_PARALLEL, False):
            self._data_parallel_size = self.num_nodes * self.num_processes
            self._tensor_parallel_size = 1
        super().setup_environment()

    @contextlib.contextmanager
    def state_in_place(self) -> Iterator[None]:
        """What `dump_checkpoint` holds are this rank's slices, not copies of them."""
        self._in_place = True
        try:
            yield
        finally:
            self._in_place = False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if not self._in_place:
            return super().lightning_module_state_dict()
        assert self.model is not None
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self._in_place:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        return get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer))

    def _write(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        if not self._save_distributed_checkpoint:
            super()._write(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        with replaced(path, leads=self.is_global_zero, barrier=self.barrier) as partial:
            super()._write(checkpoint, partial, storage_options)

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
    FSDPStrategy: FSDPLearner,
    ModelParallelStrategy: ModelParallelLearner,
    SingleDeviceStrategy: OneDeviceStrategy,
}


@functools.cache
def class_over(inner: type[Strategy]) -> type[DecoupledDiLoCoStrategy]:
    """Our class over one of Lightning's or of a user's, whose overrides run beneath ours.

    Raises:
        ValueError: it is ours already.
    """
    if inner in _CLASSES:
        return _CLASSES[inner]
    if issubclass(inner, DecoupledDiLoCoStrategy):
        raise ValueError(
            "inner is a DecoupledDiLoCoStrategy itself; allowed: the strategy that trains inside "
            "it, as DDPStrategy(...)."
        )
    known = known_class(inner)
    if known is not None:
        base = _CLASSES[known]
    else:
        base = UnknownParallelLearner if issubclass(inner, ParallelStrategy) else UnknownLearner
    own = {"_inner": inner, "__module__": __name__}
    bases = (_UsersOwn, base, inner)
    return types.new_class(f"{inner.__name__}Learner", bases, exec_body=lambda ns: ns.update(own))


class _UsersOwn(DecoupledDiLoCoStrategy):
    """Of a class made here, which pickle finds by the class it is made over."""

    _inner: type[Strategy]
    _always_group = True

    @property
    def inner_name(self) -> str:
        return self._inner.__name__

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_over, (self._inner,), self.__getstate__()


def _made_over(inner: type[Strategy]) -> DecoupledDiLoCoStrategy:
    return object.__new__(class_over(inner))
