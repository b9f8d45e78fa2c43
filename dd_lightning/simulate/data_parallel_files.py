"""Checkpoints and evaluations of a data-parallel run, at times of virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from dd_lightning.launch.evaluator import Evaluator
from dd_lightning.simulate.random_state import RandomState


class Keeper:
    """Lightning's checkpoints of the job, as its rank 0 writes them.

    Args:
        every_s: of virtual time; writing takes none.
        keep: the newest so many.
    """

    def __init__(self, folder: Path, every_s: float, keep: int) -> None:
        self.folder, self._every_s, self._keep = folder, every_s, keep
        self._files: list[Path] = []
        self._due_s = 0.0

    @property
    def newest(self) -> Path | None:
        """The last one that was written."""
        return self._files[-1] if self._files else None

    def is_due(self, now: float) -> bool:
        """Whether it is time; at 0 s for the values before the first step."""
        return now >= self._due_s

    def begin_again(self, now: float) -> None:
        """The job goes on from the newest one: its timer begins anew."""
        self._due_s = now + self._every_s

    def save(self, trainer: pl.Trainer, step: int, now: float) -> Path | None:
        """Write one; None where this step has one."""
        while self._due_s <= now:
            self._due_s += self._every_s
        file = self.folder / f"step-{step:06d}.ckpt"
        if file in self._files:
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(file, weights_only=False)
        self._files.append(file)
        while len(self._files) > self._keep:
            self._files.pop(0).unlink()
        return file


class Evaluations:
    """The run's evaluator: the newest checkpoint, at the same times as that of a real run."""

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        self._values, self._folder = values, folder
        self._every_s = values["evaluate"]["every_s"]
        self._due_s = self._every_s
        self._evaluator: Evaluator | None = None
        self._newest: tuple[str, dict[str, Tensor]] | None = None
        self._done = ""
        self._random = RandomState.current()

    def saw(self, file: str, theta: dict[str, Tensor], initial: bool) -> None:
        """A checkpoint was written; that of the initial values is evaluated at once."""
        self._newest = (file, theta)
        if initial:
            self._evaluate(initial=True, final=False)

    def poll(self, now: float) -> None:
        """It is this late."""
        if now < self._due_s:
            return
        self._due_s += self._every_s * (1 + (now - self._due_s) // self._every_s)
        if self._newest is not None and self._newest[0] != self._done:
            self._evaluate(initial=False, final=False)

    def close(self, final: bool) -> None:
        """The run is over: the last checkpoint counts, if `final`."""
        if final and self._newest is not None:
            self._evaluate(initial=False, final=True)

    def _evaluate(self, initial: bool, final: bool) -> None:
        assert self._newest is not None  # asked before
        ours = RandomState.current()
        self._random.restore()
        if self._evaluator is None:
            self._evaluator = Evaluator(self._values, self._folder)
        file, theta = self._newest
        self._evaluator.evaluate_theta(theta, file, initial, final)
        self._done = file
        self._random = RandomState.current()
        ours.restore()
