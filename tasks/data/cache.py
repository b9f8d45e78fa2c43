"""Build a folder once, however many processes ask for it at the same time."""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .shards import MANIFEST

log = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 600.0  # how long a process waits for another one's build
POLL_S = 0.1


def build_once(
    folder: Path, build: Callable[[Path], None], timeout_s: float = BUILD_TIMEOUT_S
) -> Path:
    """Return `folder`, calling `build(temporary_folder)` first where it is not complete yet.

    The temporary folder is renamed when `build` returns, so no one sees half a data set; a build
    that dies leaves nothing that counts as prepared, and its lock ends with its process.

    Raises:
        TimeoutError: another process held the lock for `timeout_s`.
    """
    if (folder / MANIFEST).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.parent / f".{folder.name}.lock", timeout_s):
        if (folder / MANIFEST).is_file():
            return folder
        started = time.monotonic()
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            build(partial)
            shutil.rmtree(folder, ignore_errors=True)  # without a manifest: not a data set
            partial.chmod(0o755)  # mkdtemp made it private; other users may share the cache
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # nothing left there after the rename
        log.info("prepared %s in %.1f s", folder, time.monotonic() - started)
    return folder


@contextmanager
def locked(path: Path, timeout_s: float) -> Iterator[None]:
    """Hold an advisory lock that the kernel drops when its process dies.

    Raises:
        TimeoutError: another process held it for `timeout_s`.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has been preparing data for {timeout_s:g} s (lock "
                        f"{path}): end it, or choose another task.data.cache_dir"
                    ) from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)
