"""A small disk under the syncer's checkpoints, which can be full: a real tmpfs. Linux and root.

`mount()` before the syncer writes anything, `unmount()` after all has ended: what is on the disk is
then in the ordinary folder. A launcher that is killed between the two leaves the mount behind, with
the checkpoints on it: copy them, then `umount RUN/syncer`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

FILLER = "filler"  # the file that takes what space is left
MOUNT_TIMEOUT_S = 10.0
BLOCK = bytes(1 << 20)


class SmallDisk:
    """Mounted over `folder`, which it makes where it is not there."""

    def __init__(self, folder: Path, size_mib: int) -> None:
        self._folder = folder
        self._size_mib = size_mib
        self._mounted = False

    def mount(self) -> None:
        """Mount, keeping what the folder holds (a run that is gone on with).

        Raises:
            OSError: it could not be mounted; the text says what the system said.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        held = self._folder.with_name(f"{self._folder.name}.under")
        shutil.copytree(self._folder, held, dirs_exist_ok=True)
        options = f"size={self._size_mib}m,mode=0755"
        _command("mount", "-t", "tmpfs", "-o", options, "dd_lightning", str(self._folder))
        self._mounted = True
        shutil.copytree(held, self._folder, dirs_exist_ok=True)
        shutil.rmtree(held)

    def fill(self) -> None:
        """Take all space that is left."""
        with open(self._folder / FILLER, "wb", buffering=0) as file:
            size = len(BLOCK)
            while size:
                try:
                    file.write(BLOCK[:size])
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    size //= 2

    def free(self) -> None:
        """Give it back."""
        (self._folder / FILLER).unlink(missing_ok=True)

    def unmount(self) -> None:
        """Put what is on the disk into the ordinary folder. Idempotent.

        Raises:
            OSError: it could not be unmounted.
        """
        if not self._mounted:
            return
        self.free()
        held = self._folder.with_name(f"{self._folder.name}.held")
        shutil.copytree(self._folder, held, dirs_exist_ok=True)
        _command("umount", str(self._folder))
        self._mounted = False
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._folder)
        os.rename(held, self._folder)


def _command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=MOUNT_TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")
