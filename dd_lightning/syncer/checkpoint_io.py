"""Lightning's checkpoint files, written whole or not at all; on request beside the training loop.

Lightning's own `AsyncCheckpointIO` copies likewise, but queues any number of writes and raises what
goes wrong in the next save: a full disk would end the run.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from dd_lightning.crash_points import reach

PARTIAL = ".partial"


@dataclass(frozen=True, slots=True)
class InBackground:
    """`storage_options` of a save that returns once the tensors are copied.

    Both are called in the writing thread: `before_rename` when the file is whole and on the disk
    under its temporary name (what it raises keeps the file from coming to be), `done` at the end
    with what went wrong, or None, and the bytes of the tensors.
    """

    before_rename: Callable[[], None]
    done: Callable[[BaseException | None, int], None]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary name, forces it to the disk, then renames it.

    In the background it takes one copy of every tensor for as long as the write lasts. A crash
    loses the checkpoint that is being written, never one that was there before.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike, storage_options: Any = None
    ) -> None:
        """As Lightning's, without half a file ever. With `InBackground` errors go to its `done`."""
        path = Path(path)
        if not isinstance(storage_options, InBackground):
            write_whole(checkpoint, path)
            return
        copied = apply_to_collection(checkpoint, Tensor, _copy)
        reach("checkpoint.copied")
        # daemon: a disk that hangs must not keep the process from its end
        threading.Thread(
            target=write_and_tell,
            args=(copied, path, storage_options),
            name="syncer-checkpoint",
            daemon=True,
        ).start()


def write_whole(
    checkpoint: dict[str, Any], path: Path, before_rename: Callable[[], None] = lambda: None
) -> None:
    """Write `checkpoint` to `path` in one rename; what fails leaves nothing behind.

    Raises:
        OSError: of the disk.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with open(partial, "wb") as file:
            sink = _Sink(file)
            torch.save(checkpoint, sink)
            sink.check()
            reach("checkpoint.written")
            file.flush()
            os.fsync(file.fileno())
        before_rename()
        reach("checkpoint.synced")
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
        raise
    reach("checkpoint.renamed")
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Sink:
    """Takes everything that torch writes and keeps the first error of the disk for `check`: one
    raised inside `torch.save` comes out as another error, of its own closing of the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._error: OSError | None = None
        self._begun = False

    def write(self, data: bytes) -> int:
        if self._error is None:
            try:
                self._file.write(data)
                if not self._begun:
                    self._begin()
            except OSError as error:
                self._error = error
        return len(data)

    def _begin(self) -> None:
        self._begun = True
        self._file.flush()
        reach("checkpoint.half_written")

    def flush(self) -> None:
        """torch asks for it; the file is flushed by its writer."""

    def check(self) -> None:
        """Raise the first error."""
        if self._error is not None:
            raise self._error


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def write_and_tell(checkpoint: dict[str, Any], path: Path, option: InBackground) -> None:
    """Write, drop the copies, then call `option.done` with what became of it."""
    num_bytes = _bytes_of(checkpoint)
    error: BaseException | None = None
    try:
        write_whole(checkpoint, path, option.before_rename)
    except BaseException as raised:  # whoever is told decides what it means for the run
        error = raised
    checkpoint.clear()  # the copy ends with the write, not with the frame that holds it
    option.done(error, num_bytes)


def _bytes_of(checkpoint: dict[str, Any]) -> int:
    sizes: list[int] = []
    apply_to_collection(checkpoint, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
