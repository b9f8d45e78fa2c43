"""Our strategy over one of a class that nobody has tried, by the same mechanism."""

from __future__ import annotations

import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn

from dd_lightning.learner.divides_data import DividesData
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class UnknownLearner(DecoupledDiLoCoStrategy):
    """What must hold is in the warning of `inner.py`; what can be seen not to hold is refused."""

    @property
    def _is_group(self) -> bool:
        return getattr(self, "world_size", 1) > 1

    def barrier(self, name: str | None = None) -> None:
        """Its `setup` may never have come by `model_to_device`: this is the last moment."""
        super().barrier(name)
        if name == "run-stage" and self._session is None:
            self._join()

    def _join(self) -> None:
        if self._trainer.state.fn == TrainerFn.FITTING:
            self._check()
        super()._join()

    def _check(self) -> None:
        """Raises ValueError."""
        name, module = self.inner_name, self.lightning_module
        if self._is_group and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                f"{name} has {self.world_size} ranks but no process group of torch.distributed, by "  # type: ignore[attr-defined]
                "which the ranks of a learner agree; allowed: strategies that make one in "
                "`setup_environment`, or a single process."
            )
        assert module is not None  # connected before any hook
        for own_name, parameter in module.named_parameters():
            if parameter.is_meta or (parameter.numel() == 0 and self._is_group):
                raise ValueError(
                    f"{name} leaves parameter {own_name} without elements on this rank, so it can "
                    "neither be read nor merged; allowed: whole parameters on every rank, "
                    'DTensors, or FSDP\'s. Use inner="fsdp2" to shard.'
                )


class UnknownParallelLearner(DividesData, UnknownLearner):
    """Of several devices, by Lightning's `ParallelStrategy`."""
