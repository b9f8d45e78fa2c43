"""Which Lightning strategy trains inside a learner."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.xla import XLAStrategy

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
    "fsdp": FSDPStrategy,
    "fsdp2": _fsdp2,
    "single_device": SingleDeviceStrategy,
}
KNOWN = (DDPStrategy, FSDPStrategy, ModelParallelStrategy, SingleDeviceStrategy)
_CANNOT: dict[type[Strategy], str] = {
    DeepSpeedStrategy: "its engine steps on copies of the parameters that it keeps to itself, so "
    "that what is merged into the model would be overwritten by the next step. Use "
    'inner="fsdp2" or "fsdp", which shard as its stages 2 and 3 do',
    XLAStrategy: "its processes have no process group of torch.distributed, by which the ranks of "
    "a learner agree. Use one XLA device a learner",
}


def inner_strategy(inner: Any) -> Strategy:
    """The strategy behind `inner`: the user's own, or a new one by its name here or in Lightning's
    registry. Warns of one that nobody has tried.

    Raises:
        ValueError: no strategy, or one that cannot be a learner.
    """
    if isinstance(inner, str):
        _check_works(_named_class(inner))
        inner = NAMES[inner]() if inner in NAMES else StrategyRegistry.get(inner)
    if not isinstance(inner, Strategy):
        raise _refusal(type(inner).__name__)
    _check_works(type(inner))
    if isinstance(inner, FSDPStrategy) and not inner.kwargs.get("use_orig_params"):
        raise ValueError(
            "inner is FSDPStrategy(use_orig_params=False), which hides the parameters' names and "
            "shapes; allowed: True, the default of FSDPStrategy."
        )
    if known_class(type(inner)) is None:
        warnings.warn(_of_unknown(type(inner).__name__), stacklevel=4)
    return inner


def known_class(inner: type[Strategy]) -> type[Strategy] | None:
    """Lightning's own class that `inner` is or extends; None where that is none of `KNOWN`."""
    lightnings = next(base for base in inner.__mro__ if base.__module__.startswith("lightning."))
    return lightnings if lightnings in KNOWN else None


def _named_class(name: str) -> type[Strategy]:
    if name in NAMES:
        return Strategy
    if name not in StrategyRegistry:
        raise _refusal(repr(name))
    found = StrategyRegistry[name]["strategy"]
    if not isinstance(found, type):  # ours: a function
        raise _refusal(repr(name))
    return found


def _check_works(kind: type[Strategy]) -> None:
    for cannot, why in _CANNOT.items():
        if issubclass(kind, cannot):
            raise ValueError(f"inner is {kind.__name__}, which cannot be a learner: {why}.")


def _refusal(given: str) -> ValueError:
    classes = ", ".join(kind.__name__ for kind in KNOWN)
    return ValueError(
        f"inner is {given}; allowed: {' | '.join(NAMES)}, another name of Lightning's registry, or "
        f"a strategy object: of {classes} or of a class of your own (of `lightning`, not "
        "`pytorch_lightning`)."
    )


def _of_unknown(name: str) -> str:
    return (
        f"inner is {name}, with which no learner has been tested. It can be one if (1) parameters "
        "are whole on every rank (or DTensors, or FSDP's) and what is written into them is what "
        "the next step begins from: no copies elsewhere; (2) every rank makes every "
        "optimizer step, through `Strategy.optimizer_step`; (3) several ranks have "
        "torch.distributed's process group before the first batch; (4) checkpoints are Lightning's "
        "one file. Compare a short run with the same one under a single device."
    )
