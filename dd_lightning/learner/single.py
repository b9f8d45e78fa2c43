"""Which Lightning strategy trains inside a learner of one process."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy

NAMES: dict[str, type[Strategy]] = {
    "auto": DDPStrategy,
    "ddp": DDPStrategy,
    "single_device": SingleDeviceStrategy,
}


def inner_class(inner: Any) -> type[Strategy]:
    """The class behind `inner`, a name or a strategy object.

    Raises:
        ValueError: another strategy.
    """
    if isinstance(inner, str) and inner in NAMES:
        return NAMES[inner]
    if type(inner) in (DDPStrategy, SingleDeviceStrategy):
        return type(inner)
    given = repr(inner) if isinstance(inner, str) else type(inner).__name__
    raise ValueError(
        f"inner is {given}; allowed: {' | '.join(NAMES)}, or an object of DDPStrategy or "
        "SingleDeviceStrategy (of `lightning`, not `pytorch_lightning`). Learners that are groups "
        "(fsdp, fsdp2, deepspeed) come in a later version."
    )
