"""`launcher.step_log` in virtual time: when each step of a learner began and ended."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dd_lightning.report.step_spans import SPANS


class StepRecord:
    """Appends `began_s,ended_s` a step to the learner's folder, all its lives in one file.

    A kill loses the step in progress: a line is written, and the file closed, after each.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._path, self._clock = folder / SPANS, clock
        self._began_s = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self._began_s = self._clock()

    def end(self) -> None:
        """It ends now."""
        with open(self._path, "a") as file:
            file.write(f"{self._began_s:.6f},{self._clock():.6f}\n")
