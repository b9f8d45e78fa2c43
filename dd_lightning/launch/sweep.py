"""A job of a sweep (`-m`): which folder is its own, and whether it has been played already.

A job is its resolved configuration, not its number: `job.json` in a folder of the sweep says whose
it is. The same command with the same `hydra.sweep.dir`, also with values added, therefore skips
what has finished. A job that failed or was cut short is played anew in an emptied folder, which
loses that job's earlier work: a study compares whole runs. With `launcher.resume=last` such a job
goes on from its checkpoints instead.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dd_lightning.launch.leftovers import await_leftovers
from dd_lightning.launch.processes import PR_SET_PDEATHSIG
from dd_lightning.report.read import SUMMARY, TAPE
from dd_lightning.report.study import JOB

RESOLVER = "job_folder"  # hydra.sweep.subdir asks it
PID = "DD_SWEEP_PID"  # of the process that runs the sweep, for its workers
ORPHANED = 130  # exit code of a worker whose sweep is gone
BESIDE = "resume"  # launcher.resume says how a job is gone on with, not what it is


def fingerprint(values: Mapping[str, Any]) -> str:
    """SHA-256 of a resolved configuration, without `launcher.resume`."""
    values = dict(values)
    if isinstance(launcher := values.get("launcher"), Mapping):
        values["launcher"] = {key: one for key, one in launcher.items() if key != BESIDE}
    return hashlib.sha256(repr(_ordered(values)).encode()).hexdigest()


def _ordered(value: Any) -> Any:
    """Mappings as lists of pairs in one order, whatever their keys are."""
    if isinstance(value, Mapping):
        pairs = ((str(key), _ordered(one)) for key, one in value.items())
        return sorted(pairs, key=lambda pair: pair[0])
    return [_ordered(one) for one in value] if isinstance(value, list | tuple) else value


def job_folder(number: int, *, _root_: DictConfig) -> str:
    """Name of the job's folder in `hydra.sweep.dir`; made and marked as its own.

    That which bears the job's mark already, else the first without another's from `number` on.
    Hydra writes into the folder before our code runs, hence a resolver.
    """
    keys = [key for key in _root_ if key != "hydra"]
    config = OmegaConf.masked_copy(_root_, keys)
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException:  # the job itself will say so, in a folder of its own
        values = OmegaConf.to_container(config, resolve=False)
    overrides = list(_root_.hydra.overrides.task)
    return find_or_take(Path(str(_root_.hydra.sweep.dir)), number, fingerprint(values), overrides)


OmegaConf.register_new_resolver(RESOLVER, job_folder, replace=True)


def find_or_take(sweep: Path, number: int, sha256: str, overrides: Collection[str]) -> str:
    """The name of the folder that belongs to the job; safe where jobs start at the same time."""
    own = [mark.parent for mark in sorted(sweep.glob(f"*/{JOB}")) if _owner(mark) == sha256]
    if own:  # several where two that are the same began at once
        return max(own, key=lambda folder: SweepJob(folder).finished).name
    for candidate in itertools.count(number):
        folder = sweep / str(candidate)
        if not (folder / TAPE).exists() and take(folder, sha256, overrides):
            return folder.name
    raise AssertionError("numbers do not end")


def take(folder: Path, sha256: str, overrides: Collection[str]) -> bool:
    """Mark a folder as this job's; False: it is another's."""
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / JOB
    if not mark.exists():
        written = folder / f".{JOB}.{os.getpid()}"
        written.write_text(json.dumps({"sha256": sha256, "overrides": list(overrides)}, indent=1))
        try:
            os.link(written, mark)  # whole at once, and only one can
        except FileExistsError:
            pass
        finally:
            written.unlink()
    return _owner(mark) == sha256


def _owner(mark: Path) -> str:
    return str(json.loads(mark.read_text())["sha256"])


@dataclass(frozen=True, slots=True)
class SweepJob:
    """A job whose folder nobody else uses as long as this is open (`open_job`)."""

    folder: Path

    @property
    def status(self) -> str | None:
        """How an earlier start ended; None where it did not, or there was none."""
        path = self.folder / SUMMARY
        return json.loads(path.read_text()).get("status") if path.is_file() else None

    @property
    def finished(self) -> bool:
        """It is skipped."""
        return self.status == "finished"

    @property
    def begun(self) -> bool:
        """An earlier start left a run."""
        return (self.folder / TAPE).exists()

    def can_go_on(self) -> bool:
        """An earlier start left checkpoints that `launcher.resume=last` reads."""
        return self.begun and any((self.folder / "syncer").glob("*.ckpt"))

    def empty(self, keep: Collection[str]) -> None:
        """Remove what an earlier start left, but for the mark and the names in `keep`.

        Raises:
            ValueError: processes of it are still running.
        """
        await_leftovers(self.folder)
        for path in self.folder.iterdir():
            if path.name in (JOB, *keep):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


@contextmanager
def open_job(folder: Path, values: Mapping[str, Any], overrides: Collection[str]) -> Iterator[Any]:
    """The job of this configuration in `folder`, once nobody else plays it.

    Where two jobs of a sweep are the same (a sampler may ask twice), the second waits as long as
    the first lives, and then finds it finished.

    Raises:
        ValueError: the folder is another configuration's.
    """
    if not take(folder, fingerprint(values), overrides):
        raise ValueError(
            f"hydra.sweep.subdir gives the folder {str(folder)!r}, which holds a job of another "
            f"configuration; allowed: ${{{RESOLVER}:${{hydra.job.num}}}} (the default), or a name "
            "that no other job of the sweep has."
        )
    with open(folder / JOB) as mark:
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting: another process plays {folder}", flush=True)
            fcntl.flock(mark, fcntl.LOCK_EX)
        yield SweepJob(folder)


@contextmanager
def ends_with_sweep() -> Iterator[None]:
    """In a worker of joblib: it ends, and the run it plays in order, once its sweep was killed.

    Else it would play the run to its end and then wait for more. The kernel sends SIGTERM, by
    which a run is interrupted (Linux); a sweep that was gone before is noticed by its pid.
    """
    sweep = int(os.environ.get(PID, os.getppid()))
    if sweep == os.getpid():  # n_jobs=1: joblib plays its jobs in the sweep's own process
        yield
        return
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        if os.getppid() == sweep:
            yield
    finally:
        if os.getppid() != sweep:
            os._exit(ORPHANED)  # nobody reads results any more


class SaysHowToGoOn(Callback):
    """Before the first job: where the sweep is, and how to go on with it should it be cut."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Called by Hydra."""
        os.environ[PID] = str(os.getpid())
        sweep = config.hydra.sweep.dir
        print(
            f"sweep in {sweep}: the same command with hydra.sweep.dir={sweep} goes on with it and "
            "skips the jobs that have finished",
            flush=True,
        )
