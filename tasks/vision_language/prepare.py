"""From named pictures to shards: split, written once under a content key."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from dd_lightning.tasks.data import (
    Manifest,
    Origin,
    ReadyShards,
    build_once,
    check_settings,
    read_manifest,
    warn_without_effect,
    write_manifest,
    write_shards,
)
from dd_lightning.tasks.vision.extra import require
from dd_lightning.tasks.vision.own import webdataset_origin
from dd_lightning.tasks.vision.pictures import is_validation

from .names import BYTES, Tokenizer
from .sources import NamedPicture, openmoji_named, openmoji_origin, webdataset_named

SOURCES = ("openmoji", "webdataset", "shards")
FORMAT = 1  # raise when the same settings would give other shards
VALIDATION_PERCENT = 15
VALIDATION_SHARDS = 2


@dataclass(frozen=True, slots=True)
class VisionLanguageData:
    """Which pictures, how large, and how their names become ids.

    Args:
        source: "openmoji", "webdataset" (tars of png or jpg, and txt), whose URL pattern is
            `path`, or "shards": prepared before, at `path`, a folder or URL.
        size: pixels of a side.
        vocabulary: ids: 256 bytes, the others are the training names' most frequent words.
        text_length: ids of a name at most, its end included; longer names are cut off.
        num_shards: training shards, at least data slots x ranks; more where one would be large.
        cache_dir: where prepared folders are kept; relative to the current directory.
    """

    source: str = "openmoji"
    path: str = ""
    size: int = 32
    vocabulary: int = 512
    text_length: int = 32
    num_shards: int = 64
    cache_dir: str = field(default_factory=lambda: os.environ.get("DD_DATA", "data"))

    def __post_init__(self) -> None:
        least = {"size": 4, "vocabulary": BYTES, "text_length": 2, "num_shards": 1}
        check_settings(self, SOURCES, ("webdataset", "shards"), least)
        require("torchvision", "task.data")
        if self.ready() is not None:
            warn_without_effect(self, "num_shards")

    def ready(self) -> ReadyShards | None:
        """The shards of `source=shards`."""
        if self.source != "shards":
            return None
        return ReadyShards(self.path, self.cache_dir, "vision_language")

    def origin(self) -> Origin:
        """The source as it is on this machine now."""
        return webdataset_origin(self.path) if self.path else openmoji_origin()

    def pictures(self) -> Iterable[NamedPicture]:
        """All of the source's, scaled."""
        return webdataset_named(self.path, self.size) if self.path else openmoji_named(self.size)

    def folder(self) -> Path:
        """Where this data set is, or will be: the name holds a hash of all that determines it."""
        if (ready := self.ready()) is not None:
            return ready.folder()
        key = {"format": FORMAT, **asdict(self), "versions": self.origin().versions}
        del key["cache_dir"], key["path"]  # its content counts, not its place
        del key["text_length"]  # of the ids, which are made at reading
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return Path(self.cache_dir).absolute() / f"vision-language-{self.source}-{digest[:16]}"

    def prepare(self) -> Path:
        """Make the shards where they do not exist yet; safe from many processes at once.

        Raises:
            ValueError: the source has too few pictures, or a package is missing.
        """
        if (ready := self.ready()) is not None:
            return self._checked(ready.prepare({"size": self.size}))
        return build_once(self.folder(), partial(_build, self))

    def _checked(self, folder: Path) -> Path:
        needed = BYTES + len(read_manifest(folder).info["words"])
        if self.vocabulary < needed:
            raise ValueError(
                f"task.data.vocabulary is {self.vocabulary}, but the shards at {self.path} were "
                f"prepared with more: set task.data.vocabulary={needed}"
            )
        return folder


def unique(pictures: Iterable[NamedPicture]) -> list[NamedPicture]:
    """Each picture once (of equal ones the first), in an order fixed by the pixels alone."""
    first: dict[bytes, NamedPicture] = {}
    for one in pictures:
        first.setdefault(one.picture.digest, one)
    return [first[digest] for digest in sorted(first)]


def _build(data: VisionLanguageData, folder: Path) -> None:
    pictures = unique(data.pictures())
    held_out = [one for one in pictures if is_validation(one.picture, VALIDATION_PERCENT)]
    train = [one for one in pictures if not is_validation(one.picture, VALIDATION_PERCENT)]
    if len(train) < data.num_shards or len(held_out) < VALIDATION_SHARDS:
        raise ValueError(
            f"{len(pictures)} different pictures are too few: {VALIDATION_PERCENT}% of them are "
            f"held out, in {VALIDATION_SHARDS} shards, and the others must fill "
            f"task.data.num_shards={data.num_shards}: lower that or add pictures"
        )
    shards = {
        "train": write_shards(folder, "train", _records(train), data.num_shards),
        "validation": write_shards(folder, "validation", _records(held_out), VALIDATION_SHARDS),
    }
    import PIL

    info = {
        "task": "vision_language",
        **asdict(data.origin()),
        "size": data.size,
        "words": list(Tokenizer.learn((one.name for one in train), data.vocabulary).words),
        "encoded_by": {"pillow": PIL.__version__},
        "pictures": {"train": len(train), "validation": len(held_out)},
    }
    write_manifest(folder, Manifest(**shards, info=info))


def _records(pictures: list[NamedPicture]) -> list[dict[str, object]]:
    return [{"png": one.picture.png, "txt": one.name} for one in pictures]
