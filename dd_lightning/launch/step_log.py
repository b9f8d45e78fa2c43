"""The duration of every step of a learner and of its boundary, in `steps.csv` of its folder.

For benches of the kit (`launcher.step_log`): the tape has quantiles only. A kill loses what was
written in the last second.
"""

from __future__ import annotations

import csv
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import lightning.pytorch as pl

STEPS = "steps.csv"
FLUSH_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Step:
    """One inner step, from the end of the one before to its own, and its boundary; seconds."""

    seconds: float
    boundary_s: float


class StepLog(pl.Callback):
    """Appends a line a step: process id, seconds, seconds of the boundary.

    The last of the callbacks, so that what they take is in the step; its own cost is too.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STEPS
        self._file: IO[str] | None = None
        self._end: float | None = None
        self._flushed_s = 0.0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self._path, "a")  # noqa: SIM115 (held while it trains)
        self._end = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now, before = time.monotonic(), self._end
        self._end = now
        assert self._file is not None  # opened in on_train_start
        if before is not None:
            boundary_s = trainer.strategy.boundary_s  # type: ignore[attr-defined] (ours)
            self._file.write(f"{os.getpid()},{now - before:.6f},{boundary_s:.6f}\n")
        if now - self._flushed_s > FLUSH_EVERY_S:
            self._file.flush()
            self._flushed_s = now

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_steps(folder: Path) -> list[list[Step]]:
    """The steps of each incarnation of the learner in `folder`; a torn last line is left out."""
    lives: dict[str, list[Step]] = defaultdict(list)
    with open(folder / STEPS, newline="") as file:
        for row in csv.reader(file):
            if len(row) == 3 and row[2]:
                lives[row[0]].append(Step(float(row[1]), float(row[2])))
    return list(lives.values())
