"""Checkpoints that are directories, as sharded learners write them: whole or not there, and
readable by a learner of another kind.

What a kill loses: while one is written, only that one. Between the two renames that put it in the
place of another, both names: the older lies under NAME.before, and a learner takes another file.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from lightning.fabric.plugins import TorchCheckpointIO

META = "meta.pt"  # Lightning's: all but weights and optimizer state
PARTIAL, BEFORE = ".partial", ".before"


def is_distributed(path: Any) -> bool:
    """Whether a checkpoint is a directory that several ranks wrote."""
    return (Path(path) / META).is_file()


def has_every_part(folder: Path) -> bool:
    """Whether the files of all ranks are there, as long as their table says."""
    from torch.distributed.checkpoint import FileSystemReader

    try:
        table = FileSystemReader(folder).read_metadata().storage_data
        ends: dict[str, int] = {}
        for part in table.values():
            end = part.offset + part.length
            ends[part.relative_path] = max(end, ends.get(part.relative_path, 0))
        return all((folder / name).stat().st_size >= end for name, end in ends.items())
    except (OSError, EOFError, ValueError, AttributeError, UnpicklingError):
        return False  # torn: whichever part of it cannot be read


@contextlib.contextmanager
def replaced(path: Path, *, leads: bool, barrier: Callable[[str], None]) -> Iterator[Path]:
    """A directory to write into, which takes the place of `path` once all ranks have written.

    Every rank calls it; `leads` on one of them.
    """
    partial = path.with_name(path.name + PARTIAL)
    before = path.with_name(path.name + BEFORE)
    if leads:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    barrier("dd_lightning.checkpoint_begins")
    yield partial
    barrier("dd_lightning.checkpoint_written")
    if leads:
        _remove(before)
        if path.exists():
            path.rename(before)
        partial.rename(path)
        _remove(before)
    barrier("dd_lightning.checkpoint_replaced")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_in_one(folder: Any, weights_only: bool | None) -> dict[str, Any]:
    """The checkpoint as one file would hold it, for a learner whose parameters are not sharded.

    Takes the whole of it in host memory on every rank. The directory's table is read as Lightning
    and torch do, who keep it pickled: a learner's own files, or others that you trust.
    """
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.format_utils import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    found: dict[str, Any] = {}
    reader, planner = FileSystemReader(str(folder)), _EmptyStateDictLoadPlanner()
    _load_state_dict(found, storage_reader=reader, planner=planner, no_dist=True)
    meta = Path(folder) / META
    checkpoint = TorchCheckpointIO().load_checkpoint(meta, "cpu", weights_only=weights_only)
    checkpoint["state_dict"] = found["model" if "model" in found else "state_dict"]
    optimizers = sorted(
        (key for key in found if key.startswith("optimizer_")), key=lambda key: int(key[10:])
    )
    checkpoint["optimizer_states"] = [numbered(found[key]) for key in optimizers]
    return checkpoint


def numbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with parameters by number, as torch's own, instead of by name."""
    groups, numbers = [], {}
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    states = {numbers[name]: values for name, values in state.get("state", {}).items()}
    return {"state": states, "param_groups": groups}
