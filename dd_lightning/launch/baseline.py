"""Plain Lightning on a run's own task: what one learner alone comes to, without our strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from dd_lightning.launch.task import VALIDATION_LOSS, build_data, build_module

QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "devices": 1,
}


@dataclass(frozen=True, slots=True)
class Baseline:
    """How a plain run ended: loss on the validation set that the run's evaluator uses."""

    loss: float
    steps: int
    parameters: int


def train_alone(values: Mapping[str, Any], batch_factor: int = 1) -> Baseline:
    """Train one model for the steps of one learner, on all the data, and validate it.

    Args:
        values: a run's resolved `config.yaml`.
        batch_factor: times the learners' batch size.
    """
    data = dict(values["task"]["data"])
    data["batch_size"] *= batch_factor
    values = {**values, "task": {**values["task"], "data": data}}
    pl.seed_everything(values["seed"], workers=True)
    module = build_module(values)
    trainer = pl.Trainer(**values["trainer"] | QUIET)
    trainer.fit(module, datamodule=build_data(values))
    judge = pl.Trainer(
        accelerator=values["trainer"]["accelerator"],
        precision=values["trainer"]["precision"],
        **QUIET,
    )
    found = judge.validate(module, datamodule=build_data(values), verbose=False)[0]
    parameters = sum(parameter.numel() for parameter in module.parameters())
    return Baseline(found[VALIDATION_LOSS], trainer.global_step, parameters)
