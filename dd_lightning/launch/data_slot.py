"""The part of the data that is a learner's own: wanted by its number, given by the syncer.

A learner that nobody planned for may have any id; which slot is free it learns when it joins, after
the datamodule was built and before its first batch. The file beside its checkpoints keeps it, so
that a restart finds its position in the same data.
"""

from __future__ import annotations

import logging
import zlib
from pathlib import Path

import lightning.pytorch as pl

log = logging.getLogger(__name__)

SLOT_FILE = "data_slot"


def number_of(learner: str) -> int:
    """A number of its own for the learner's random states: its id where that is one."""
    return int(learner) if learner.isdecimal() else zlib.crc32(learner.encode())


def wanted_slot(learner: str, folder: Path, slots: int) -> int | None:
    """The slot of its earlier life, else that of its id; None: any free one."""
    kept = folder / SLOT_FILE
    if kept.exists():
        return int(kept.read_text())
    return int(learner) if learner.isdecimal() and int(learner) < slots else None


class DataSlot(pl.Callback):
    """Gives the datamodule the slot that the syncer gave, and keeps it in the learner's folder.

    Args:
        in_data: whether the datamodule divides the data itself, by its `data_slot`.
    """

    def __init__(self, folder: Path, in_data: bool) -> None:
        self._folder, self._in_data = folder, in_data

    def on_joined(self, trainer: pl.Trainer) -> None:
        """The learner has just joined; its training data is still to be made."""
        slot = trainer.strategy.given_slot  # type: ignore[attr-defined] (ours)
        if trainer.is_global_zero:
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / SLOT_FILE).write_text(f"{slot}\n")
        data = trainer.datamodule
        if self._in_data and data.data_slot != slot:
            log.info("data slot %d, given by the syncer", slot)
            data.data_slot = slot
