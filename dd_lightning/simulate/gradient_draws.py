"""What each learner would contribute from one and the same Θ, many times over: Monte Carlo draws of
its outer gradient after 1, 2, ... inner steps on its own data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from dd_lightning.algorithm import canonical_name, outer_gradient
from dd_lightning.launch.task import build_data, build_module
from dd_lightning.launch.theta import load_theta

Gradients = dict[str, Tensor]  # of each parameter, by canonical name


class Draws(pl.Callback):
    """Trains from Θ for `most` steps, notes the outer gradient after each, and again from Θ.

    Moments of the inner optimizer go on from draw to draw, as they do over an apply; the first
    stretch only fills them.
    """

    def __init__(self, theta: Mapping[str, Tensor], most: int) -> None:
        self.found: list[list[Gradients]] = []  # by draw and number of steps - 1
        self._theta, self._most = theta, most
        self._current: list[Gradients] = []
        self._filling = True

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        load_theta(pl_module, self._theta)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object
    ) -> None:
        own = {canonical_name(name): one.detach() for name, one in pl_module.named_parameters()}
        self._current.append({n: outer_gradient(self._theta[n], value) for n, value in own.items()})
        if len(self._current) < self._most:
            return
        if not self._filling:
            self.found.append(self._current)
        self._filling, self._current = False, []
        load_theta(pl_module, self._theta)


def draw_gradients(
    values: Mapping[str, Any],
    theta: Mapping[str, Tensor],
    learner: int,
    *,
    draws: int,
    most: int,
) -> list[list[Gradients]]:
    """`[draws][most]`: of each draw, the outer gradient after 1, 2, ... `most` steps.

    Args:
        values: a run's configuration; learner i has data slot i of `values["learners"]`.
        theta: parameters by canonical name.
        draws: on batches that follow one another, so no two draws share a sample of an epoch.

    Raises:
        ValueError: a setting of the task is refused.
    """
    pl.seed_everything(values["seed"] + 1000 * learner, workers=True, verbose=False)
    noted = Draws(theta, most)
    settings = dict(values["trainer"])
    settings |= {"max_steps": (draws + 1) * most, "logger": False, "enable_checkpointing": False}
    settings |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(**settings, devices=1, callbacks=[noted])
    data = build_data(values, learner, values["learners"])
    trainer.fit(_without_warmup(values), datamodule=data)
    assert len(noted.found) == draws, "a learner's data have no end"
    return noted.found


def _without_warmup(values: Mapping[str, Any]) -> pl.LightningModule:
    task = dict(values["task"])
    module = dict(task["module"])
    module["optimizer"] = {**module["optimizer"], "warmup_steps": 0, "schedule": "constant"}
    return build_module({**values, "task": {**task, "module": module}})
