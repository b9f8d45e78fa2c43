"""Main of one learner's process: an ordinary Lightning job with our strategy.

`python -m dd_lightning.launch.learner CONFIG.yaml --learner ID`, with the syncer's address in
DD_SYNCER (and DD_VIA where a proxy stands in between). No Hydra in here.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from dd_lightning.chaos.callback import FaultCallback
from dd_lightning.chaos.plan import FaultPlan
from dd_lightning.launch.data_slot import DataSlot, number_of, wanted_slot
from dd_lightning.launch.learner_kind import (
    inner_of,
    own_rank,
    step_floor_s,
    trainer_options,
)
from dd_lightning.launch.leaving import Checkpoints, run_until_told
from dd_lightning.launch.settings import learner_values, run_shape
from dd_lightning.launch.step_floor import StepFloor
from dd_lightning.launch.step_log import StepLog
from dd_lightning.launch.task import build_data, build_module, takes_slots
from dd_lightning.learner.own_checkpoint import newest_whole
from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy
from dd_lightning.learner.surroundings import Surroundings

CHECKPOINTS = "checkpoints"


def train(
    values: Mapping[str, Any],
    learner: str,
    folder: Path,
    syncer: str,
    *,
    checkpoint: Path | None = None,
    surroundings: Surroundings | None = None,
    callbacks: Sequence[Callback] | None = None,
) -> None:
    """Train one learner to its end.

    Args:
        values: the resolved configuration of the whole run.
        folder: this learner's own, `learners/<id>`; its newest readable checkpoint is gone on from.
        syncer: address, tcp://HOST:PORT.
        checkpoint: gone on from where the folder has none.
        surroundings: of a simulated learner.
        callbacks: in place of the checkpoints, faults and step floor of a real one.
    """
    values = learner_values(values, learner)
    slots = values["algorithm"]["max_learners"] or values["learners"]
    slot = wanted_slot(learner, folder, slots)
    # learners differ in dropout and augmentation; all begin from the Θ that the syncer hands out
    pl.seed_everything(values["seed"] + number_of(learner), workers=True)
    module = build_module(values)
    data = build_data(values, slot or 0, slots)  # `DataSlot` corrects it after the join
    strategy = DecoupledDiLoCoStrategy(
        syncer,
        learner=learner,
        inner=inner_of(values, module),
        data="none" if takes_slots(values) else "shard",
        connect_timeout=values["timeouts"]["connect"],
        data_slot=slot,
        validate_global=values["learner"].get("validate_global", False),
    )
    strategy.surroundings = surroundings
    trainer = pl.Trainer(
        **values["trainer"],
        **trainer_options(values),
        strategy=strategy,
        default_root_dir=str(folder),
        logger=_logger(values["logger"], folder),
        callbacks=[
            DataSlot(folder, takes_slots(values)),
            *(_callbacks(values, learner, folder) if callbacks is None else callbacks),
        ],
    )
    last = newest_whole(folder / CHECKPOINTS) or checkpoint
    trainer.fit(module, datamodule=data, ckpt_path=None if last is None else str(last))


def _logger(loggers: Mapping[str, Any] | None, folder: Path) -> CSVLogger | bool:
    """Aim is written by the syncer's process, from what learners report."""
    csv = (loggers or {}).get("csv")
    return CSVLogger(str(folder), name="csv", **csv) if csv is not None else False


def _callbacks(values: Mapping[str, Any], learner: str, folder: Path) -> list[Callback]:
    checkpoint = Checkpoints(
        dirpath=str(folder / CHECKPOINTS),
        save_last=True,
        save_top_k=1,
        train_time_interval=timedelta(seconds=values["checkpoint"]["every_s"]),
    )
    floor_s = step_floor_s(values)
    callbacks: list[Callback] = [checkpoint]
    callbacks += [StepFloor(floor_s)] if floor_s > 0 else []
    if own_rank() != 0:
        return callbacks  # what follows is for the learner as a whole
    plan = FaultPlan.load(values["chaos"], run_shape(values))
    if plan.kinds:  # after the floor: what it lengthens is the padded step
        callbacks.append(FaultCallback(plan, learner, folder.parent.parent))
    if values["launcher"]["step_log"]:
        callbacks.append(StepLog(folder))
    return callbacks


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="the run folder's config.yaml")
    parser.add_argument("--learner", required=True, help="id: 0 to M-1, or one of its own")
    parser.add_argument("--checkpoint", type=Path, help="of a cut; its own newer ones come first")
    arguments = parser.parse_args(argv)
    if "DD_SYNCER" not in os.environ:
        parser.error("DD_SYNCER is not set; give the syncer's address, as tcp://127.0.0.1:29400")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    values = yaml.safe_load(arguments.config.read_text())
    folder = arguments.config.absolute().parent / "learners" / arguments.learner
    address, checkpoint = os.environ["DD_SYNCER"], arguments.checkpoint
    run_until_told(lambda: train(values, arguments.learner, folder, address, checkpoint=checkpoint))


if __name__ == "__main__":
    main()
