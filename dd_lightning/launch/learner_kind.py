"""What a learner of the kit is: one process, or a group of ranks under a strategy of Lightning's.

A group is one child of the launcher, whose process starts the other ranks in its own session: they
are ended with it, and a rank that is lost ends that learner only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    Strategy,
)
from torch import nn

from dd_lightning.launch import checks

LEARNER_KEYS = ("name", "devices", "overrides", "step_floor_s", "validate_global")
OVERRIDABLE = ("trainer", "task", "learner")
RANKS_WAIT = timedelta(minutes=10)  # for each other, and for what rank 0 waits for (joins, finals)


@dataclass(frozen=True, slots=True)
class Kind:
    """One choice of `learner=`."""

    is_group: bool
    inner: type[Strategy] | None = None  # None: the strategy's own "auto"


KINDS = {
    "single": Kind(is_group=False),
    "ddp": Kind(is_group=True, inner=DDPStrategy),
    "fsdp": Kind(is_group=True, inner=FSDPStrategy),
    "fsdp2": Kind(is_group=True, inner=ModelParallelStrategy),
}


def check_learner(values: Mapping[str, Any]) -> None:
    """`learner.name` and `learner.devices` of one learner's values.

    Raises:
        ValueError: one of them is not allowed.
    """
    name = checks.choice(values, "learner.name", KINDS)
    checks.known_keys(values["learner"], LEARNER_KEYS, "learner.")
    devices = checks.integer(values, "learner.devices", 1)
    _check_options(values)
    if KINDS[name].is_group:
        if values["mode"] == "simulate":
            raise ValueError(
                f"learner is {name!r}; allowed: single under mode=simulate, where a learner is a "
                "thread. Simulate single learners with the batches of a whole group instead."
            )
    elif devices != 1:
        groups = " or ".join(name for name, kind in KINDS.items() if kind.is_group)
        raise ValueError(
            f"learner.devices is {devices!r}; allowed: 1 under learner=single. For more, choose "
            f"learner={groups}."
        )


def step_floor_s(values: Mapping[str, Any]) -> float:
    """Seconds that a step of this learner takes at least."""
    own = values["learner"].get("step_floor_s")
    return float(values["launcher"]["step_floor_s"] if own is None else own)


def _check_options(values: Mapping[str, Any]) -> None:
    learner, least = values["learner"], values["launcher"]["step_floor_s"]
    if (own := learner.get("step_floor_s")) is not None:
        if values["mode"] == "simulate":
            raise ValueError(
                f"learner.step_floor_s is {own!r}; allowed: null under mode=simulate, where "
                "simulate.speeds says who is slow."
            )
        if checks.seconds(values, "learner.step_floor_s", positive=False) < least:
            raise ValueError(  # faults are planned by the least
                f"learner.step_floor_s is {own!r}; allowed: at least launcher.step_floor_s = "
                f"{least:g}, or null. Lower that one."
            )
    if learner.get("validate_global", False):
        checks.choice(values, "learner.validate_global", [False, True])
        if values["trainer"].get("limit_val_batches") == 0:
            raise ValueError(
                "learner.validate_global is True, but trainer.limit_val_batches is 0, so that "
                "learners never validate; allowed: false, or trainer.limit_val_batches=1.0 with "
                "trainer.val_check_interval."
            )


def inner_of(values: Mapping[str, Any], module: nn.Module) -> str | Strategy:
    """What the strategy of this learner extends.

    Args:
        module: under FSDP1, each module of its `unit_classes` is a unit, and what is left is one.
    """
    name, devices = values["learner"]["name"], values["learner"]["devices"]
    inner = KINDS[name].inner
    if inner is None:
        return "auto"
    if inner is ModelParallelStrategy:
        # one file a checkpoint, which a life of another kind or with fewer ranks can read too
        return ModelParallelStrategy(
            devices, 1, save_distributed_checkpoint=False, timeout=RANKS_WAIT
        )
    if inner is FSDPStrategy:
        units = set(getattr(module, "unit_classes", ()))
        return FSDPStrategy(timeout=RANKS_WAIT, auto_wrap_policy=units or None)
    return DDPStrategy(timeout=RANKS_WAIT)


def trainer_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """Devices, and for a group that this process starts its ranks itself, whatever job (Slurm,
    torchrun) the launcher is in."""
    devices = values["learner"]["devices"]
    if not KINDS[values["learner"]["name"]].is_group:
        return {"devices": devices}
    return {"devices": devices, "plugins": [LightningEnvironment()]}


def own_rank() -> int:
    """Of this process in its learner; known before the Trainer is."""
    return int(os.environ.get("LOCAL_RANK", "0"))
