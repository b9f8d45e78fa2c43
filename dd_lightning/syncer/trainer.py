"""The Trainer that runs the SyncerModule: one CPU process, no validation, our checkpoint files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from dd_lightning.syncer.checkpoint_io import AtomicCheckpointIO


def make_trainer(
    folder: Path,
    callbacks: Sequence[Callback] = (),
    checkpoint_io: Callable[[], AtomicCheckpointIO] = AtomicCheckpointIO,
    **options: Any,
) -> Trainer:
    """A Trainer for one pass over a RoundStream.

    Args:
        folder: the run's `syncer/`.
        checkpoint_io: how its checkpoints are written.
        options: further Trainer arguments, such as a logger.
    """
    # "GPU available", tips: the syncer's log is for the run
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.WARNING)
    settings: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        plugins=[checkpoint_io()],
        callbacks=list(callbacks),
        **(settings | options),
    )
