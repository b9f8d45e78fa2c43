"""Files at a URL, by fsspec: bounded waits, a few tries, checksums.

A try that stalls or breaks off loses what it had fetched of its one file; the file's name is only
given to a whole, checked copy.
"""

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
from fsspec.callbacks import Callback
from fsspec.implementations.local import LocalFileSystem

SETTING = "task.data.path"
STALL_TIMEOUT_S = 60.0  # a try ends after so long without a byte
ATTEMPTS = 4
RETRY_AFTER_S = 1.0  # before the second try; doubled before each other
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError)  # no try would change these
# Of what file systems tell about a file, what changes when its content does.
FINGERPRINT = ("size", "ETag", "Content-MD5", "md5Hash", "Last-Modified", "LastModified", "mtime")


class Abandoned(Exception):
    """Ends a copy that is no longer waited for."""


class Progress(Callback):
    """When the last bytes came; ends the copy once it is abandoned."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = time.monotonic()
        self.abandoned = False

    def relative_update(self, inc: int = 1) -> None:
        self.heard = time.monotonic()
        if self.abandoned:
            raise Abandoned


def is_url(path: str) -> bool:
    """Whether `path` names a protocol."""
    return "://" in path


def known_to_fsspec(url: str) -> bool:
    """Whether fsspec has the URL's protocol, installed or not (`pipe:`, for one, it has not)."""
    return is_url(url) and fsspec.utils.get_protocol(url) in fsspec.available_protocols()


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for `url`, and the path in it.

    Raises:
        ValueError: an unknown protocol, or its package is missing.
    """
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise ValueError(
            f"{SETTING} is {url!r}: its protocol needs a package that is missing ({error})"
        ) from error
    except ValueError as error:
        known = ", ".join(fsspec.available_protocols())
        raise ValueError(
            f"{SETTING} is {url!r} ({error}); allowed are the protocols of fsspec: {known}"
        ) from error


def local_path(url: str) -> Path | None:
    """The file or folder on this machine that `url` names; None if it is elsewhere."""
    if not is_url(url):
        return Path(url)
    if not known_to_fsspec(url):
        return None
    system, path = file_system(url)
    return Path(path) if isinstance(system, LocalFileSystem) else None


def fetch(url: str, target: Path, sha256: str | None = None) -> None:
    """Copy the file at `url` to `target`, which appears whole or not at all.

    Args:
        sha256: what the content must have; another one counts as a failed try.

    Raises:
        ValueError: there is no such file, or `ATTEMPTS` tries have failed.
    """
    system, path = file_system(url)
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    os.close(descriptor)
    partial = Path(name)

    def copy(progress: Progress) -> None:
        system.get_file(path, name, callback=progress)

    try:
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(RETRY_AFTER_S * 2 ** (attempt - 1))
            failure = _try(url, copy) or _mismatch(partial, sha256)
            if failure is None:
                partial.chmod(0o644)  # mkstemp made it private; other users may share the cache
                partial.replace(target)
                return
    finally:
        partial.unlink(missing_ok=True)
    raise ValueError(
        f"{url} could not be fetched in {ATTEMPTS} tries, the last one failed with: {failure}"
    )


def fingerprint(url: str) -> str:
    """What the file system tells of a file that changes when its content does.

    Raises:
        ValueError: there is no such file, or its file system does not answer.
    """
    system, path = file_system(url)
    found: dict[str, Any] = {}
    failure = _try(url, lambda progress: found.update(system.info(path)))
    if failure is not None:
        raise ValueError(f"{SETTING}: {url} cannot be opened: {failure}")
    return " ".join(f"{key}={found[key]}" for key in FINGERPRINT if found.get(key) is not None)


@contextmanager
def opened(url: str) -> Iterator[BinaryIO]:
    """A fetched copy, in a temporary folder while the context lasts.

    Raises:
        ValueError: as `fetch`.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "fetched"
        fetch(url, target)
        with target.open("rb") as file:
            yield file


def _try(url: str, work: Callable[[Progress], Any]) -> str | None:
    """Why `work` failed, None if it did not; in a thread of its own, since not every file system
    bounds its waits. A thread that stalls is left behind and ends with its next byte."""
    progress, failures = Progress(), list[Exception]()

    def run() -> None:
        try:
            work(progress)
        except Exception as error:  # each file system has errors of its own
            failures.append(error)

    thread = threading.Thread(target=run, name="fetch", daemon=True)
    thread.start()
    while thread.is_alive():
        left_s = progress.heard + STALL_TIMEOUT_S - time.monotonic()
        if left_s <= 0:
            progress.abandoned = True
            return f"nothing came for {STALL_TIMEOUT_S:g} s"
        thread.join(left_s)
    if failures and isinstance(failures[0], FINAL):
        raise ValueError(
            f"{SETTING}: {url} cannot be opened ({type(failures[0]).__name__})"
        ) from failures[0]
    return f"{type(failures[0]).__name__}: {failures[0]}" if failures else None


def _mismatch(file: Path, sha256: str | None) -> str | None:
    if sha256 is None:
        return None
    with file.open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found == sha256:
        return None
    return (
        f"its sha256 is {found[:12]}..., the manifest has {sha256[:12]}...: it was changed after "
        "it was prepared, or not copied whole"
    )
