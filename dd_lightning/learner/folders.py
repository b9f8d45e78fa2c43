"""Each learner's ModelCheckpoints write into folders of its own, also on one file system."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

OWNER_FILE = "learner.txt"  # beside checkpoints: whose they are
OWNER_S = 1.0  # at most, for whoever made the file to have written it


def without_folder(trainer: Any) -> list[Any]:
    """The checkpoint callbacks whose folder Lightning is going to choose; call it before setup."""
    return [c for c in trainer.checkpoint_callbacks if getattr(c, "dirpath", "") is None]


def claim(trainer: Any, learner: str, chosen_by_lightning: list[Any]) -> None:
    """Mark the folders that this learner's ModelCheckpoints write to as its own.

    Processes that start together may be given one `lightning_logs/version_N`: the second learner
    then writes into a folder inside it, with a warning.

    Raises:
        ValueError: a folder that was given, or one without a logger (where `ckpt_path="last"` looks
            for files), is another learner's, whose files it would overwrite.
    """
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        writes = getattr(callback, "save_top_k", 0) != 0 or getattr(callback, "save_last", False)
        if folder is None or not writes or "://" in str(folder) or trainer.fast_dev_run:
            continue
        owner = _owner(Path(folder) / OWNER_FILE, learner)
        if owner in ("", learner):
            continue
        if callback not in chosen_by_lightning or not trainer.loggers:
            raise ValueError(
                f"ModelCheckpoint of learner {learner!r} would write into {folder}, which holds "
                f"the checkpoints of learner {owner!r}. Give each learner its own, "
                f'Trainer(default_root_dir="learners/{learner}") or ModelCheckpoint(dirpath=...); '
                f"if that learner is gone for good, delete {Path(folder) / OWNER_FILE}."
            )
        callback.dirpath = str(Path(folder) / f"learner-{learner}")
        warnings.warn(
            f"learner {owner!r} writes its checkpoints into {folder}, so those of {learner!r} go "
            f"to {callback.dirpath}: give each learner a default_root_dir of its own.",
            stacklevel=2,
        )


def _owner(mark: Path, learner: str) -> str:
    """Whose folder it is; ours from now on, if it was nobody's."""
    mark.parent.mkdir(parents=True, exist_ok=True)
    try:
        with mark.open("x") as file:
            file.write(learner)
        return learner
    except FileExistsError:
        deadline = time.monotonic() + OWNER_S
    while not (owner := mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)  # it is being written
    return owner
