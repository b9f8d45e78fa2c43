"""What faults befall in virtual time: the disk under the syncer's checkpoints. Nothing is decided
here; plans, guards and records are those of `chaos`."""

from __future__ import annotations

import errno
import os


class VirtualDisk:
    """Takes everything, or nothing while it is full; what was on it stays."""

    def __init__(self) -> None:
        self._is_full = False

    def mount(self) -> None:
        """It is there."""

    def unmount(self) -> None:
        """Its files are in the run folder anyway."""

    def fill(self) -> None:
        """Take all space that is left."""
        self._is_full = True

    def free(self) -> None:
        """Give it back."""
        self._is_full = False

    def check(self) -> None:
        """Raises OSError, as the system does where no space is left."""
        if self._is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
