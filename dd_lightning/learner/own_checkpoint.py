"""A learner's own checkpoint: what Lightning's file holds of ours, and which file to go on from."""

from __future__ import annotations

import logging
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from dd_lightning.learner.data_position import can_skip
from dd_lightning.learner.distributed_files import META, has_every_part
from dd_lightning.learner.rng import restore_rng

log = logging.getLogger(__name__)

CHECKPOINT_KEY = "decoupled_diloco"
ALL_LOADED = "_CheckpointConnector.resume_end"  # Lightning's barrier: all but the random states
RNG_OF_RANKS = "rng_of_ranks"  # random states of the ranks after the first
STATE_VERSION = 1


def whole(path: Path) -> bool:
    """Whether a checkpoint file is complete: every part there, every checksum right.

    Read in small pieces, so that memory holds no second copy. Of a directory: see
    `distributed_files.py`.
    """
    if path.is_dir():
        return has_every_part(path) and whole(path / META)
    try:
        with zipfile.ZipFile(path) as file:
            return file.testzip() is None
    except (OSError, zipfile.BadZipFile, EOFError, UnpicklingError):
        return False


def newest_whole(folder: Path) -> Path | None:
    """The newest readable checkpoint of a folder, None where there is none.

    Lost by a torn one (power cut, full disk): the steps since the one before it; without any other
    the learner comes back as one that lost its state. Either is said in a warning.
    """
    found = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    for number, path in enumerate(found):
        if whole(path):
            return path
        left = "the one before it" if number + 1 < len(found) else "no other: it starts without one"
        log.warning("checkpoint %s cannot be read (torn?); this learner takes %s", path, left)
    return None


def take_out(checkpoint: dict[str, Any], learner: str) -> dict[str, Any] | None:
    """Our state of a file that was just read, None in a file of plain Lightning's; raises as
    `check_state`."""
    state = checkpoint.pop(CHECKPOINT_KEY, None)
    if state is not None:
        check_state(state, learner)
    return state


def begin_rng(state: dict[str, Any] | None, learner: str, rank: int, ranks: int) -> None:
    """Go on with the random states of this rank, before the order of the next epoch is drawn;
    they stay in `state`, those of other ranks do not: two with one state would draw one mask."""
    if state is None:
        return
    others = state.pop(RNG_OF_RANKS, [])
    if len(others) + 1 != ranks and rank == 0:
        warnings.warn(
            f"the checkpoint has random states of {len(others) + 1} ranks, this learner has "
            f"{ranks}: rank 0 goes on with its own, any other begins anew, so masks differ from an "
            "undisturbed run's.",
            stacklevel=2,
        )
    if rank:
        state.pop("rng", None)
        if len(others) + 1 == ranks:
            state["rng"] = others[rank - 1]
    restore_own_rng(state, learner)


def go_on(state: Mapping[str, Any], trainer: Any, learner: str, datamodule_restored: bool) -> None:
    """The last of the restoring, right before the first batch."""
    warn_of_position(trainer, int(state["data_position"]), datamodule_restored)
    # in the middle of an epoch an undisturbed run draws no new order, as this process just did
    if trainer.fit_loop.restarted_mid_epoch:
        restore_own_rng(state, learner)


def check_state(state: Mapping[str, Any], learner: str) -> None:
    """Raises ValueError for a state that a newer version wrote; warns of another learner's."""
    if state.get("version", 0) > STATE_VERSION:
        raise ValueError(
            f"the checkpoint's learner state has version {state['version']}, this dd_lightning "
            f"reads up to {STATE_VERSION}: resume with the version that wrote it."
        )
    if state.get("learner") != learner:
        warnings.warn(
            f"the checkpoint was written by learner {state.get('learner')!r} and is loaded by "
            f"{learner!r}: random states are not taken from it, since two learners would draw the "
            "same masks.",
            stacklevel=2,
        )


def restore_own_rng(state: Mapping[str, Any], learner: str) -> None:
    """The random states of this learner's own checkpoint."""
    if state.get("learner") == learner and "rng" in state:
        restore_rng(state["rng"])


def warn_of_position(trainer: Any, position: int, datamodule_restored: bool) -> None:
    """Lightning itself warns in the middle of a finite epoch; of an endless stream it says nothing,
    although it begins again at its first batch unless somebody keeps its position."""
    loader = trainer.fit_loop._combined_loader
    loaders = [] if loader is None else loader.flattened
    stateful = loaders and all(hasattr(each, "load_state_dict") for each in loaders)
    kept = bool(stateful) or datamodule_restored or can_skip(trainer.datamodule)
    if position and not kept and trainer.num_training_batches == float("inf"):
        warnings.warn(
            f"{position} batches of this learner's data were used before its checkpoint, and "
            "nothing restores that position: the data begins again at its first batch. Give the "
            "DataLoader or the LightningDataModule state_dict and load_state_dict, or the latter "
            "skip_to(batches).",
            stacklevel=2,
        )
