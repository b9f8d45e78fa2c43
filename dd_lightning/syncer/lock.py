"""One syncer per run: a lock while it lives, and an epoch that grows at every start."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from dd_lightning.crash_points import reach

LOCK = "lock"


class RunLocked(ValueError):
    """Another syncer of the run is alive."""


class RunLock:
    """Holds `syncer/lock` and the epoch of this start, which `syncer/epoch` names.

    The kernel gives the lock up when the process ends, however it ends. The epoch file is checked
    before each checkpoint besides, for file systems that do not carry locks between hosts.

    Raises:
        RunLocked: another process holds the lock.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._epoch_file = folder / "epoch"
        self._file: IO[str] = open(folder / LOCK, "a+")  # noqa: SIM115 (held for the run)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            holder = self._file.read().strip()
            self._file.close()
            raise RunLocked(
                f"run-dir is {str(folder.parent)!r}, whose syncer is running (pid {holder}); "
                "allowed: a folder without a running syncer. End that one first."
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        reach("lock.taken")
        self.epoch = self._read() + 1
        self._write(self.epoch)
        reach("lock.epoch_written")

    def check(self) -> None:
        """Raise RuntimeError when a later syncer has started on this run."""
        found = self._read()
        if found != self.epoch:
            raise RuntimeError(
                f"epoch {found} of this run has started; this is epoch {self.epoch}, which may not "
                "write any more"
            )

    def release(self) -> None:
        """Let another syncer start."""
        self._file.close()

    def _read(self) -> int:
        return int(self._epoch_file.read_text()) if self._epoch_file.exists() else 0

    def _write(self, epoch: int) -> None:
        partial = self._epoch_file.with_name("epoch.partial")
        with open(partial, "w") as file:
            file.write(f"{epoch}\n")
            file.flush()
            os.fsync(file.fileno())
        reach("lock.epoch_partial")
        os.replace(partial, self._epoch_file)
