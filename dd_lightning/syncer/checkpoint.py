"""Syncer checkpoints, through Lightning: written whole or not at all, the newest few kept.

`step-<epoch>-<merges>.ckpt` holds Θ under the learners' names, outer optimizer, loops and callbacks
(Lightning's), and under `STATE_KEY` the core's state, configuration, layout and versions: plain
values and tensors, so `weights_only=True` loads it.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor

from dd_lightning.protocol.actions import WriteCheckpoint
from dd_lightning.protocol.layout import Layout
from dd_lightning.syncer.module import STATE_KEY, layout_from_plain

PARTIAL = ".partial"
_NAME = re.compile(r"step-(\d+)-(\d+)\.ckpt")


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is on disk under `file` (its name in the folder)."""

    job: WriteCheckpoint
    file: str


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name, forces it to the disk, then renames it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """As Lightning's, without a second copy in memory and without half a file ever."""
        path = Path(path)
        partial = path.with_name(path.name + PARTIAL)
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)


class CheckpointWriter(Callback):
    """Saves after the step of a WriteCheckpoint job.

    Args:
        folder: the run's `syncer/`.
        keep: newest checkpoints kept; the one of version 0 is kept beside them, since the
            evaluator measures the run's first loss on it.
        check: raises when another syncer has taken the run over; called before each write.
        deliver: called (in the training thread) with each checkpoint written.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        check: Callable[[], None],
        deliver: Callable[[Saved], None],
    ) -> None:
        self._folder, self._keep = folder, keep
        self._check, self._deliver = check, deliver

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write, remove what is too old, report."""
        if not isinstance(batch, WriteCheckpoint):
            return
        self._check()
        file = f"step-{batch.state['epoch']}-{batch.state['merges']}.ckpt"
        trainer.save_checkpoint(self._folder / file, weights_only=False)
        self._remove_old()
        self._deliver(Saved(batch, file))

    def _remove_old(self) -> None:
        for path in checkpoints(self._folder)[self._keep :]:
            if _number(path)[1] > 0:
                path.unlink()
        for path in self._folder.glob(f"step-*.ckpt{PARTIAL}"):
            path.unlink()  # of a syncer that was killed while writing: nothing else removes it


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest (epoch, merges) first."""
    found = [path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def newest_checkpoint(folder: Path, verify: bool = False) -> Path | None:
    """The newest checkpoint that is whole; torn ones are passed over. None where there is none.

    Args:
        verify: check the checksum of every byte too, as a restart does; reads the whole file.
    """
    for path in checkpoints(folder):
        try:
            with zipfile.ZipFile(path) as archive:
                if not verify or archive.testzip() is None:
                    return path
        except (zipfile.BadZipFile, FileNotFoundError):
            continue  # torn, or removed since it was listed
    return None


@dataclass(frozen=True, slots=True)
class SyncerCheckpoint:
    """What is read from a checkpoint: Θ by canonical name, and the syncer's own state."""

    path: Path
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    state: dict[str, Any]

    @property
    def layout(self) -> Layout:
        """The run's layout."""
        return layout_from_plain(self.state["layout"])

    @property
    def values(self) -> dict[str, Tensor]:
        """Parameters and buffers."""
        return self.parameters | self.buffers


def read_checkpoint(path: str | os.PathLike[str]) -> SyncerCheckpoint:
    """Read a syncer's checkpoint; the outer optimizer's state stays on disk.

    Raises:
        ValueError: the file is not a syncer's checkpoint.
    """
    path = Path(path)
    loaded: dict[str, Any] = {}
    if path.is_file() and zipfile.is_zipfile(path):
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if STATE_KEY not in loaded:
        raise ValueError(
            f"checkpoint is {str(path)!r}; allowed: a file that a syncer wrote "
            "(RUN/syncer/step-<epoch>-<merges>.ckpt)."
        )
    # cloned, so that nothing reads through the map once the file is removed
    values = {name: tensor.clone() for name, tensor in loaded["state_dict"].items()}
    kinds = {info["name"]: info["kind"] for info in loaded[STATE_KEY]["layout"]["tensors"]}
    return SyncerCheckpoint(
        path,
        {name: tensor for name, tensor in values.items() if kinds[name] != "buffer"},
        {name: tensor for name, tensor in values.items() if kinds[name] == "buffer"},
        loaded[STATE_KEY],
    )


def load_parameters(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Θ by canonical name, float32, buffers included. Raises ValueError as `read_checkpoint`."""
    return read_checkpoint(path).values


def parameters_sha256(parameters: Mapping[str, Tensor]) -> str:
    """SHA-256 over the tensors given (Θ's parameters, no buffers) in name order, raw bytes.

    Bytes are little-endian float32, row-major, without names or shapes.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        values = parameters[name].detach().to("cpu", torch.float32).contiguous().numpy()
        digest.update(
            memoryview(values.astype("<f4", copy=False)).cast("B") if values.size else b""
        )
    return digest.hexdigest()


def _number(path: Path) -> tuple[int, int]:
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `checkpoints` lists no others
    return int(match[1]), int(match[2])


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
