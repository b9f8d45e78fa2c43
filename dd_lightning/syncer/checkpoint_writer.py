"""Writes the checkpoints that the core asks for, beside the merges, and keeps the newest few."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dd_lightning.crash_points import reach
from dd_lightning.protocol.actions import WriteCheckpoint
from dd_lightning.syncer.checkpoint import checkpoints, number_of
from dd_lightning.syncer.checkpoint_io import PARTIAL, InBackground
from dd_lightning.syncer.cuts import cut_file, cut_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk under `file` (its name in the folder)."""

    job: WriteCheckpoint
    file: str


@dataclass(frozen=True, slots=True)
class NotSaved:
    """The disk did not take a checkpoint; nothing of it is left there."""

    job: WriteCheckpoint
    file: str
    error: BaseException
    num_bytes: int  # that it needs

    def reason(self, folder: Path) -> str:
        """What the disk said and what to do, without the path: the tape names no folders."""
        said = getattr(self.error, "strerror", None) or str(self.error)
        free_mib = self.free_bytes(folder) / 2**20
        return (
            f"{self.file} was refused by the disk ({said}); it needs {self.num_bytes / 2**20:.1f} "
            f"MiB, and {free_mib:.1f} MiB are free. Free space in the run's folder."
        )

    def free_bytes(self, folder: Path) -> int:
        """What is left on the disk."""
        return shutil.disk_usage(folder).free


class CheckpointWriter(Callback):
    """Saves after the step of a WriteCheckpoint job: Θ is copied then, merges go on while a thread
    writes the copy. The core asks for one at a time.

    Args:
        folder: the run's `syncer/`.
        keep: newest checkpoints kept; the one of version 0 is kept beside them, since the
            evaluator measures the run's first loss on it.
        check: raises when another syncer has taken the run over; called before each write, and
            (in the writing thread) before each rename.
        deliver: called (in the writing thread) with what became of each.
        before_rename: called (in the writing thread) with the file whole under another name.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        check: Callable[[], None],
        deliver: Callable[[Saved | NotSaved], None],
        before_rename: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._keep = folder, keep
        self._check, self._deliver = check, deliver
        self._before_rename = before_rename

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Copy and begin to write."""
        if not isinstance(batch, WriteCheckpoint):
            return
        self._check()
        reach("checkpoint.asked")
        file = f"step-{batch.state['epoch']}-{batch.state['merges']}.ckpt"
        if cut := cut_of(batch):
            file = cut_file(cut)
            (self._folder / file).parent.mkdir(exist_ok=True)
        trainer.save_checkpoint(
            self._folder / file,
            weights_only=False,
            storage_options=InBackground(self._may_rename, partial(self._written, batch, file)),
        )

    def _may_rename(self) -> None:
        self._check()
        self._before_rename()

    def _written(
        self, job: WriteCheckpoint, file: str, error: BaseException | None, num_bytes: int
    ) -> None:
        if error is not None:
            self._deliver(NotSaved(job, file, error, num_bytes))
            return
        try:
            self._remove_old()
        except OSError as refused:  # space is lost, no work
            log.warning("an old checkpoint could not be removed: %s", refused)
        self._deliver(Saved(job, file))

    def _remove_old(self) -> None:
        for path in checkpoints(self._folder)[self._keep :]:
            if number_of(path)[1] > 0:
                path.unlink()
                reach("checkpoint.removed_old")
        for path in self._folder.glob(f"step-*.ckpt{PARTIAL}"):
            path.unlink()  # of a syncer that was killed while writing: nothing else removes it
