"""Which Lightning strategy trains inside a learner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)

ALL_DATA_PARALLEL = "_all_data_parallel"  # attribute of a ModelParallelStrategy made by its name


def _fsdp2() -> Strategy:
    strategy = ModelParallelStrategy()
    setattr(strategy, ALL_DATA_PARALLEL, True)
    return strategy


NAMES: dict[str, Callable[[], Strategy]] = {
    "auto": DDPStrategy,
    "ddp": DDPStrategy,
    "ddp_spawn": lambda: DDPStrategy(start_method="spawn"),
    "ddp_find_unused_parameters_true": lambda: DDPStrategy(find_unused_parameters=True),
    "fsdp2": _fsdp2,
    "single_device": SingleDeviceStrategy,
}
CLASSES = (DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)


def inner_strategy(inner: Any) -> Strategy:
    """The strategy behind `inner`: the user's own, or a new one by its name.

    Raises:
        ValueError: another strategy.
    """
    if isinstance(inner, str) and inner in NAMES:
        return NAMES[inner]()
    if type(inner) in CLASSES:
        return inner
    given = repr(inner) if isinstance(inner, str) else type(inner).__name__
    classes = ", ".join(kind.__name__ for kind in CLASSES)
    raise ValueError(
        f"inner is {given}; allowed: {' | '.join(NAMES)}, or an object of one of {classes} (of "
        "`lightning`, not `pytorch_lightning`)."
    )
