"""A learner's side of a consistent cut: record at the end of a batch, write beside the next ones.

The training thread copies what is small; parameters and optimizer state are copied while the next
forward and backward run (`state_copy.py`), and a thread writes the file. A failed write fails the
cut, in words, and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from dd_lightning.learner.cut_file import TakenApart, cut_path, put_together, write_whole
from dd_lightning.learner.cut_shards import ShardFiles
from dd_lightning.learner.group_session import FollowingSession
from dd_lightning.learner.own_checkpoint import CHECKPOINT_KEY
from dd_lightning.learner.session import LearnerSession
from dd_lightning.learner.state_copy import BackgroundCopy
from dd_lightning.learner.step_counter import StepCounter
from dd_lightning.protocol.messages import CutTaken

log = logging.getLogger(__name__)


class TakeCuts(Callback):
    """Comes after the user's callbacks at the end of each batch, where Lightning's loops are sound
    to resume from. What the module's own `on_train_batch_end` does comes later and is not in it.

    Args:
        boundary: under manual optimization, the step boundary, which would come with the next
            batch; None under automatic optimization.
        shards: where every rank writes its own; None: rank 0 writes all.
    """

    def __init__(
        self,
        session: LearnerSession | FollowingSession,
        counter: StepCounter,
        learner: str,
        boundary: Callable[[], None] | None,
        shards: ShardFiles | None = None,
    ) -> None:
        self.copied_bytes = 0  # in the training thread, at the last record
        self._session, self._counter = session, counter
        self._learner, self._boundary, self._shards = learner, boundary, shards
        self._writer: threading.Thread | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record, if it is asked for and this is a moment for it."""
        if not self._session.cuts.is_ordered:
            return
        if self._shards is not None and self._shards.refusal:
            if self._session.cuts.order is not None:
                self._session.cuts.refuse(self._shards.refusal)
            return
        if self._boundary is not None:
            self._boundary()
        if not self._counter.in_the_middle and self._session.cut_is_due:
            self._record(trainer, pl_module)

    def _record(self, trainer: Trainer, module: LightningModule) -> None:
        session, shards = self._session, self._shards
        if self._writer is not None:  # of a cut that is over, on this rank too in a moment
            self._writer.join(session.config.timeouts.flush)
        if shards is None:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        else:
            checkpoint = shards.dump(trainer)
        state = session.state()
        if state is not None:
            checkpoint[CHECKPOINT_KEY] = state
        parts = TakenApart.of(checkpoint, module, trainer.optimizers)
        self.copied_bytes = parts.copied_bytes
        part = session.record_cut()
        if state is not None:
            parts.tree[CHECKPOINT_KEY]["cut"] = part
        elif shards is None:
            return  # rank 0 writes it all
        copies = session.copies.begin(parts.later)
        path = cut_path(Path(trainer.default_root_dir).absolute(), self._learner, part["id"])
        self._writer = threading.Thread(
            target=self._write,
            args=(part["id"], path, parts.tree, copies),
            name="dd-lightning-cut",
            daemon=True,
        )
        self._writer.start()

    def _write(self, cut: str, path: Path, tree: Any, copies: BackgroundCopy) -> None:
        try:
            write = write_whole if self._shards is None else self._shards.write
            write(put_together(tree, copies.finish()), path)
            taken = CutTaken(generation=0, cut=cut, file=str(path))
        except Exception as error:  # told to who asked: the cut fails, training goes on
            log.warning("cut %s could not be written: %r", cut, error)
            taken = CutTaken(generation=0, cut=cut, error=f"{type(error).__name__}: {error}"[:1000])
        if isinstance(self._session, LearnerSession):  # rank 0 speaks
            self._session.cuts.say_taken(taken)

    def close(self, timeout_s: float) -> None:
        """Wait for a file that is being written."""
        if self._writer is not None:
            self._writer.join(timeout_s)
