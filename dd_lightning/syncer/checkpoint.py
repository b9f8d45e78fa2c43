"""Syncer checkpoints as files: which are there, which are whole, and what one holds.

`step-<epoch>-<merges>.ckpt` holds Θ under the learners' names, outer optimizer, loops and callbacks
(Lightning's), and under `STATE_KEY` the core's state, configuration, layout and versions: plain
values and tensors, so `weights_only=True` loads it.
"""

from __future__ import annotations

import hashlib
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dd_lightning.protocol.layout import Layout
from dd_lightning.syncer.module import STATE_KEY, layout_from_plain

_NAME = re.compile(r"step-(\d+)-(\d+)\.ckpt")


def checkpoints(folder: Path) -> list[Path]:
    """Checkpoints in a folder, newest (epoch, merges) first."""
    found = [path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=number_of, reverse=True)


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


def number_of(path: Path) -> tuple[int, int]:
    """(epoch, merges) that the name of a checkpoint says."""
    match = _NAME.fullmatch(path.name)
    assert match is not None  # `checkpoints` lists no others
    return int(match[1]), int(match[2])
