"""A callback that makes every step last at least so long, for models whose steps take nothing."""

from __future__ import annotations

import time
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class StepFloor(Callback):
    """Sleeps at the end of a step until `floor_s` have passed since the end of the one before.

    The sleep counts as stepping: the learner plays one whose model takes so long.
    """

    def __init__(self, floor_s: float) -> None:
        if floor_s <= 0:
            raise ValueError(f"floor_s is {floor_s!r}; allowed: seconds > 0")
        self.floor_s = floor_s
        self._end: float | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._end is None:
            self._end = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        now = time.monotonic()
        assert self._end is not None  # a batch starts before it ends
        time.sleep(max(0.0, self._end + self.floor_s - now))
        self._end = max(now, self._end + self.floor_s)

    def on_train_end(self, *_: Any) -> None:
        self._end = None
