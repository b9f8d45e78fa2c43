"""`source=shards`: a folder that was prepared before, here or at a URL.

Of a folder at a URL each shard is fetched when it is first read, checked against the manifest, and
kept; so a learner fetches its own share only, and resuming fetches no more than the shard it is in.
"""

import hashlib
import logging
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .cache import build_once, locked
from .fetch import SETTING, fetch, is_url
from .shards import MANIFEST, Manifest, parse_manifest, read_manifest

log = logging.getLogger(__name__)

SOURCE = "shards"
FETCH_WAIT_S = 600.0  # how long a process waits for a shard that another one fetches


@dataclass(frozen=True, slots=True)
class ReadyShards:
    """A prepared folder.

    Args:
        path: a folder on this machine, read in place, or a URL: `s3://bucket/text-docs-1234`.
        cache_dir: where what comes from a URL is kept.
        task: whose data it must be.
    """

    path: str
    cache_dir: str
    task: str

    def folder(self) -> Path:
        """Where its files are read; of a URL the name is made of the manifest's content, so that
        positions in checkpoints hold for every copy of the same shards.

        Raises:
            ValueError: the manifest cannot be had.
        """
        if not is_url(self.path):
            return Path(self.path).absolute()
        return self._kept(self._manifest())

    def prepare(self, expected: Mapping[str, Any]) -> Path:
        """Fetch the manifest and the files beside the shards, where they are not here yet.

        Args:
            expected: settings with which it must have been prepared, by name.

        Raises:
            ValueError: they cannot be had, or the data is of another task or other settings.
        """
        if is_url(self.path):
            manifest = self._manifest()
            folder = build_once(self._kept(manifest), partial(_copy_files, self.path, manifest))
        else:
            folder = self.folder()
        self._check(read_manifest(folder), expected)
        return folder

    def fetching(self, read: Callable[[Path], Any], manifest: Manifest) -> Callable[[Path], Any]:
        """`read`, of a shard that is fetched first where it is not here yet."""
        if not is_url(self.path):
            return read
        checksums = {one.file: one.sha256 for one in manifest.train + manifest.validation}
        return FetchFirst(self.path, checksums, read)

    def _kept(self, manifest: bytes) -> Path:
        digest = hashlib.sha256(manifest).hexdigest()
        return Path(self.cache_dir).absolute() / f"{self.task}-{SOURCE}-{digest[:16]}"

    def _manifest(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / MANIFEST
            fetch(_file_url(self.path, MANIFEST), target)
            return target.read_bytes()

    def _check(self, manifest: Manifest, expected: Mapping[str, Any]) -> None:
        if (found := manifest.info.get("task")) != self.task:
            raise ValueError(
                f"{SETTING} is {self.path!r}, whose shards are of task {found!r}; allowed are those"
                f" of {self.task!r}"
            )
        for name, given in expected.items():
            if given != (stored := manifest.info.get(name)):
                raise ValueError(
                    f"task.data.{name} is {given!r}, but the shards at {self.path} were prepared "
                    f"with {stored!r}: set task.data.{name}={stored}"
                )


@dataclass(frozen=True, slots=True)
class FetchFirst:
    """Reads a shard; picklable, for loader processes.

    Args:
        url: of the folder.
        checksums: sha256 of each shard, by file name.
    """

    url: str
    checksums: Mapping[str, str]
    read: Callable[[Path], Any]

    def __call__(self, path: Path) -> Any:
        if not path.is_file():  # a file that is there was checked when it came
            with locked(path.with_name(f".{path.name}.lock"), FETCH_WAIT_S):
                if not path.is_file():
                    fetch(_file_url(self.url, path.name), path, self.checksums[path.name])
                    log.info("fetched %s to %s", _file_url(self.url, path.name), path)
        return self.read(path)


def check_settings(
    data: Any, sources: tuple[str, ...], with_path: tuple[str, ...], least: Mapping[str, int]
) -> None:
    """What the settings of every task's data have in common.

    Args:
        data: has `source`, `path` and the integers that `least` bounds from below.
        with_path: the sources that need a path; the others take none.

    Raises:
        ValueError: one of them is not allowed.
    """
    if data.source not in sources:
        raise ValueError(f"task.data.source is {data.source!r}, allowed are {sources}")
    _check_path(data.source, data.path, with_path)
    for name, lowest in least.items():
        value = getattr(data, name)
        if not isinstance(value, int) or value < lowest:
            raise ValueError(f"task.data.{name} is {value!r}, allowed are integers >= {lowest}")


def _check_path(source: str, path: str, allowed: tuple[str, ...]) -> None:
    """Refuse a path without a source that takes one, and such a source without a path."""
    if (source in allowed) != bool(path):
        takers = " and ".join(f"source={one}" for one in allowed)
        raise ValueError(
            f"{SETTING} is {path!r} with task.data.source={source}: a path belongs to {takers}, "
            "which need one"
        )


def warn_without_effect(data: Any, *names: str) -> None:
    """Say which settings are changed that ready shards have long been made with."""
    for name in names:
        value = getattr(data, name)
        if value != type(data).__dataclass_fields__[name].default:
            warnings.warn(
                f"task.data.{name}={value} has no effect with source={SOURCE}: the shards are "
                "read as they were prepared",
                stacklevel=4,
            )


def _copy_files(url: str, manifest: bytes, folder: Path) -> None:
    for name, digest in parse_manifest(manifest, url).files.items():
        fetch(_file_url(url, name), folder / name, digest)
    (folder / MANIFEST).write_bytes(manifest)


def _file_url(url: str, name: str) -> str:
    return f"{url.rstrip('/')}/{name}"
