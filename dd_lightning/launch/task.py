"""The task's LightningModule and LightningDataModule, from `task.module` and `task.data`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate

from dd_lightning.launch import checks
from dd_lightning.launch.settings import learner_values

VALIDATION_LOSS = "val_loss"  # what a task's validation_step logs; the run's objective


def build_module(values: Mapping[str, Any]) -> pl.LightningModule:
    """The model of `task.module`.

    Raises:
        ValueError: a setting that the module refuses.
    """
    return _build(values, "task.module")


def build_data(
    values: Mapping[str, Any], data_slot: int = 0, num_data_slots: int = 1
) -> pl.LightningDataModule:
    """The data of `task.data`, for one learner's share of it.

    A datamodule that takes no `data_slot` is built without (see `takes_slots`).

    Raises:
        ValueError: a setting that the datamodule refuses.
    """
    share = {"data_slot": data_slot, "num_data_slots": num_data_slots}
    return _build(values, "task.data", **(share if takes_slots(values) else {}))


def takes_slots(values: Mapping[str, Any]) -> bool:
    """Whether the datamodule separates the learners' data itself, else the strategy must."""
    target = get_class(checks.get(values, "task.data._target_"))
    return {"data_slot", "num_data_slots"} <= inspect.signature(target).parameters.keys()


def check_task(values: Mapping[str, Any], num_data_slots: int) -> pl.LightningDataModule:
    """Build module, data and Trainer of each kind of learner once and throw them away.

    Returns:
        The data of learners without overrides, to prepare.

    Raises:
        ValueError: one of their settings is refused.
    """
    for learner in values["learner"]["overrides"] or {}:
        _check_one(learner_values(values, str(learner)), num_data_slots)
    return _check_one(values, num_data_slots)


def _check_one(values: Mapping[str, Any], num_data_slots: int) -> pl.LightningDataModule:
    build_module(values)
    check_trainer(values["trainer"])
    return build_data(values, 0, num_data_slots)


def check_trainer(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that Lightning's Trainer does not take."""
    known = list(inspect.signature(pl.Trainer).parameters)
    checks.known_keys(arguments, known, "trainer.")
    quiet = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        pl.Trainer(**arguments, devices=1, logger=False, enable_checkpointing=False)
    except Exception as error:  # Lightning's own kinds share no base class
        raise ValueError(f"trainer is {dict(arguments)}, refused by Lightning: {error}") from error
    finally:
        quiet.setLevel(level)


def _build(values: Mapping[str, Any], name: str, **extra: Any) -> Any:
    settings = checks.get(values, name)
    checks.get(values, f"{name}._target_")
    try:
        return instantiate(dict(settings), _convert_="all", **extra)
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(cause, ValueError | TypeError):
            said = str(cause)
            raise ValueError(said if said.startswith("task.") else f"{name}: {said}") from error
        raise
