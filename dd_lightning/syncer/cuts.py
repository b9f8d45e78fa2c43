"""Consistent cuts on the syncer's disk, and whoever waits for one.

`cuts/<id>.ckpt` is an ordinary checkpoint of the syncer whose state has a `cut`; `cuts/<id>.json`,
written last, lists the learners' files. Without the list the cut does not exist: a syncer that is
killed while one is taken loses that cut and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from dd_lightning.algorithm import refuse
from dd_lightning.protocol.actions import CutDone, CutFailed, WriteCheckpoint
from dd_lightning.syncer.checkpoint import SyncerCheckpoint, read_checkpoint
from dd_lightning.syncer.checkpoint_io import PARTIAL, sync_folder
from dd_lightning.syncer.operators import Operators

log = logging.getLogger(__name__)

FOLDER = "cuts"
_ID = re.compile(r"c(\d+)\.(?:ckpt|json)")


def cut_file(cut: str) -> str:
    """Where the syncer's record of a cut lies in its folder."""
    return f"{FOLDER}/{cut}.ckpt"


def cut_of(job: WriteCheckpoint) -> str:
    """The cut that a checkpoint is the syncer's record of, "" for an ordinary one."""
    return job.state.get("cut", {}).get("id", "")


def clean(folder: Path) -> int:
    """Remove what cuts left that came to nothing; the number of the last cut there was, or 0."""
    last = 0
    for path in (folder / FOLDER).glob("*"):
        found = _ID.fullmatch(path.name)
        if found is not None:
            last = max(last, int(found[1]))
        if path.name.endswith(PARTIAL) or not path.with_suffix(".json").exists():
            path.unlink()
    return last


def complete_cuts(folder: Path) -> list[str]:
    """Ids of the cuts that exist, oldest first."""
    found = [path.stem for path in (folder / FOLDER).glob("c*.json") if _ID.fullmatch(path.name)]
    return sorted(found, key=lambda cut: int(cut[1:]))


def read_manifest(folder: Path, cut: str) -> dict[str, Any]:
    """What a cut consists of.

    Raises:
        ValueError: there is no such cut.
    """
    path = folder / FOLDER / f"{cut}.json"
    manifest = json.loads(path.read_text()) if path.is_file() else {}
    if not manifest.get("complete") or not (folder / cut_file(cut)).is_file():
        there = ", ".join(complete_cuts(folder)) or "none is there"
        fix = "`dd-lightning checkpoint RUN` takes one of a running run."
        raise refuse("--cut", cut, f"the id of a complete cut of this run ({there})", fix)
    return manifest


def read_cut(folder: Path, cut: str) -> SyncerCheckpoint:
    """The syncer's record of a cut, with those learners only whose files exist.

    Raises:
        ValueError: there is no such cut, or its file is none of a syncer.
    """
    learners = read_manifest(folder, cut)["learners"]
    found = read_checkpoint(folder / cut_file(cut))
    record = found.state["core"]["cut"]
    record["learners"] = {n: row for n, row in record["learners"].items() if n in learners}
    return found


def adopt(folder: Path, restored: SyncerCheckpoint, epoch: int) -> None:
    """From now on `--resume` goes on from the cut, not from what was there after it."""
    target = folder / f"step-{epoch}-{restored.state['core']['merges']}.ckpt"
    partial = target.with_name(target.name + PARTIAL)
    try:
        os.link(restored.path, partial)
    except OSError:  # a file system without hard links
        shutil.copyfile(restored.path, partial)
    os.replace(partial, target)
    sync_folder(folder)


class CutDesk:
    """Passes requests to the core, writes the list of files, and tells who waits.

    Args:
        folder: the run's `syncer/`.
        request: begins a cut at a time; raises ValueError, saying why not.
    """

    def __init__(self, folder: Path, request: Callable[[float], str], operators: Operators) -> None:
        self._folder, self._request, self._operators = folder, request, operators
        self._waiting: dict[str, Future[dict[str, Any]]] = {}

    def asked(self, future: Future[dict[str, Any]], now: float) -> None:
        """Somebody in this process wants one: its manifest, or why there is none (ValueError: none
        can be taken now; RuntimeError: it failed)."""
        try:
            self._waiting[self._request(now)] = future
        except ValueError as error:
            future.set_exception(error)

    def ended(self, action: CutDone | CutFailed) -> None:
        """The core is done with a cut."""
        if isinstance(action, CutDone):
            try:
                manifest = self._write(action)
            except OSError as error:
                action = CutFailed(action.cut, f"its list of files was not written: {error}")
            else:
                log.info("cut %s is complete", action.cut)
                self._operators.cut_done(action.cut, manifest)
                future = self._waiting.pop(action.cut, None)
                if future is not None:
                    future.set_result(manifest)
                return
        log.warning("cut %s failed: %s", action.cut, action.reason)
        with contextlib.suppress(OSError):
            (self._folder / cut_file(action.cut)).unlink()
        self._operators.cut_failed(action.cut, action.reason)
        future = self._waiting.pop(action.cut, None)
        if future is not None:
            future.set_exception(RuntimeError(f"cut {action.cut} failed: {action.reason}"))

    def _write(self, action: CutDone) -> dict[str, Any]:
        """The list, in one rename and on the disk before anyone hears of it."""
        path = self._folder / FOLDER / f"{action.cut}.json"
        learners: Mapping[str, Any] = action.manifest["learners"]
        own = str((self._folder / cut_file(action.cut)).absolute())
        files = [own, *(row["file"] for _, row in sorted(learners.items()))]
        manifest = action.manifest | {"files": files, "complete": True}
        partial = path.with_name(path.name + PARTIAL)
        with open(partial, "w") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        sync_folder(path.parent)
        return manifest
