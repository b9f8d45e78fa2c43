"""A sharded learner's part of a consistent cut: every rank writes its own slices, at the same time.

A directory as `ModelParallelStrategy` reads it, in one rename when all is on the disk. Ranks agree
in their writing threads, over a process group that nothing else uses.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dd_lightning.learner.distributed_files import META, PARTIAL
from dd_lightning.learner.group import Group

if TYPE_CHECKING:
    from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class ShardFiles:
    """Of one rank.

    Args:
        in_place: within it Lightning's dump shares this rank's slices with the module; None: it
            cannot be had.
    """

    def __init__(
        self, group: Group, in_place: Callable[[], AbstractContextManager[None]] | None
    ) -> None:
        self.refusal = ""
        if in_place is None:
            self.refusal = (
                "its parameters are sharded otherwise than by FSDP2, of which no cut is taken yet"
            )
        self._group, self._in_place = group, in_place
        self._own: dist.ProcessGroup | None = None

    def dump(self, trainer: Any) -> dict[str, Any]:
        """Lightning's checkpoint, of which nothing is copied; every rank calls it."""
        assert self._in_place is not None  # else it was refused
        if self._own is None:
            self._own = self._group.another()
        with self._in_place():
            return trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

    def write(self, checkpoint: dict[str, Any], path: Path) -> None:
        """Called by every rank, in a thread.

        Raises:
            OSError: rank 0 could not write.
            CheckpointException: of any other rank; all raise it.
        """
        import torch.distributed.checkpoint as dcp

        partial = path.with_name(path.name + PARTIAL)
        states = {"state_dict": checkpoint.pop("state_dict")}
        for index, state in enumerate(checkpoint.pop("optimizer_states", [])):
            states[f"optimizer_{index}"] = state
        writer = dcp.FileSystemWriter(partial)
        dcp.save(states, storage_writer=writer, process_group=self._own)
        if not self._group.leads:
            return
        with open(partial / META, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(path, ignore_errors=True)  # of a cut of that number that came to nothing
        partial.rename(path)


def shard_files(strategy: DecoupledDiLoCoStrategy) -> ShardFiles | None:
    """None for a learner of which one rank can write it all."""
    if strategy.group is None or not strategy.restore_checkpoint_after_setup:
        return None
    return ShardFiles(strategy.group, getattr(strategy, "state_in_place", None))
