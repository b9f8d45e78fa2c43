"""Main of the evaluator's process: the task's validation loss of Θ, from the syncer's checkpoints.

`python -m dd_lightning.launch.evaluator RUN/config.yaml`. It evaluates version 0, then the newest
checkpoint every `evaluate.every_s`, and when its stdin is closed the last one, and ends. Each
evaluation is one line of `evaluations.jsonl`; the launcher puts them on the tape.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import yaml
from torch import Tensor

from dd_lightning.launch.task import VALIDATION_LOSS, build_data, build_module
from dd_lightning.launch.theta import load_theta
from dd_lightning.report.read import EVALUATIONS, read_evaluations
from dd_lightning.syncer.checkpoint import checkpoints, load_parameters

log = logging.getLogger(__name__)

INITIAL = "-0.ckpt"  # how the name of version 0's checkpoint ends
POLL_S = 0.2
NICE = 10  # the learners come first


class Evaluator:
    """Validates checkpoints of one run folder with the task's own validation_step."""

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        pl.seed_everything(values["seed"], workers=True)
        self._folder = folder
        self._module = build_module(values)
        self._data = build_data(values)
        trainer = values["trainer"]
        self._trainer = pl.Trainer(
            accelerator=trainer["accelerator"],
            precision=trainer["precision"],
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def evaluate(self, checkpoint: Path, initial: bool, final: bool) -> dict[str, Any]:
        """Append the loss and metrics of one checkpoint to `evaluations.jsonl`; return them.

        Raises:
            ValueError: not a checkpoint, or the task's validation logs no `val_loss`.
        """
        return self.evaluate_theta(load_parameters(checkpoint), checkpoint.name, initial, final)

    def evaluate_theta(
        self, theta: Mapping[str, Tensor], name: str, initial: bool, final: bool
    ) -> dict[str, Any]:
        """The same of parameters by name, which the tape knows as checkpoint `name`.

        Raises:
            ValueError: the task's validation logs no `val_loss`.
        """
        load_theta(self._module, theta)
        metrics = self._trainer.validate(self._module, datamodule=self._data, verbose=False)[0]
        if VALIDATION_LOSS not in metrics:
            raise ValueError(
                f"the task's validation logs {', '.join(metrics) or 'nothing'}; "
                f"it must log {VALIDATION_LOSS}"
            )
        found = {
            "file": name,
            "loss": metrics.pop(VALIDATION_LOSS),
            "metrics": metrics,
            "initial": initial,
            "final": final,
        }
        with open(self._folder / EVALUATIONS, "a") as file:
            file.write(json.dumps(found) + "\n")
        log.info("%s: %s %.4f", name, VALIDATION_LOSS, found["loss"])
        return found


def watch(evaluator: Evaluator, folder: Path, every_s: float) -> None:
    """Evaluate as long as stdin is open, then the last checkpoint."""
    done = _newest_evaluated(folder)
    due = 0.0
    ending = False
    while not ending:
        ending = _closed(POLL_S)
        found = checkpoints(folder / "syncer")
        if not found:
            continue
        newest, oldest = found[0], found[-1]
        if done is None and oldest.name.endswith(INITIAL):
            evaluator.evaluate(oldest, initial=True, final=False)
            done, due = oldest, time.monotonic() + every_s
        elif newest != done and time.monotonic() >= due:
            try:
                evaluator.evaluate(newest, initial=False, final=False)
            except ValueError:
                if newest.exists():
                    raise
                continue  # removed for newer ones since it was listed
            done, due = newest, time.monotonic() + every_s
    if found := checkpoints(folder / "syncer"):
        evaluator.evaluate(found[0], initial=False, final=True)


def _newest_evaluated(folder: Path) -> Path | None:
    """Of an earlier start of the run: it is not evaluated once more."""
    path = folder / EVALUATIONS
    files = [found["file"] for found in read_evaluations(path)] if path.exists() else []
    return folder / "syncer" / files[-1] if files else None


def _closed(timeout_s: float) -> bool:
    """Whether stdin reached its end; waits for that at most `timeout_s`."""
    ready, _, _ = select.select([sys.stdin], [], [], timeout_s)
    return bool(ready) and not os.read(sys.stdin.fileno(), 4096)


def main(argv: list[str] | None = None) -> None:
    """Parse the command line and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, help="the run folder's config.yaml")
    arguments = parser.parse_args(argv)
    os.nice(NICE)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    values = yaml.safe_load(arguments.config.read_text())
    folder = arguments.config.absolute().parent
    watch(Evaluator(values, folder), folder, values["evaluate"]["every_s"])


if __name__ == "__main__":
    main()
