"""From labelled pictures to shards: split, written once under a content key."""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from dd_lightning.tasks.data import (
    Groups,
    Manifest,
    Origin,
    ReadyShards,
    build_once,
    check_settings,
    in_shard_order,
    read_manifest,
    warn_without_effect,
    write_manifest,
    write_shards,
)

from . import digits, openmoji
from .extra import require
from .own import (
    folder_origin,
    folder_pictures,
    image_folder,
    webdataset_origin,
    webdataset_pictures,
)
from .pictures import Picture, is_validation, unique

SOURCES = ("digits", "openmoji", "folder", "webdataset", "shards")
NEED_PATH = ("folder", "webdataset", "shards")
FORMAT = 2  # raise when the same settings would give other shards
VALIDATION_PERCENT = 15
VALIDATION_SHARDS = 2


@dataclass(frozen=True, slots=True)
class VisionData:
    """Which pictures, how large.

    Args:
        source: "digits", "openmoji", "folder" (of class folders), "webdataset" (tars of png or
            jpg, and cls) or "shards" (prepared before); `path` is the folder, the tars' URL
            pattern, or the folder or URL of the shards.
        size: pixels of a side.
        classes: how many the source has; the module's output.
        num_shards: training shards, at least data slots x ranks; more where one would be large.
        cache_dir: where prepared folders are kept; relative to the current directory.
    """

    source: str = "digits"
    path: str = ""
    size: int = 8
    classes: int = 10
    num_shards: int = 64
    cache_dir: str = field(default_factory=lambda: os.environ.get("DD_DATA", "data"))

    def __post_init__(self) -> None:
        least = {"size": 4, "classes": 2, "num_shards": 1}
        check_settings(self, SOURCES, NEED_PATH, least)
        require("torchvision", "task.data")
        if self.ready() is not None:
            warn_without_effect(self, "num_shards")

    def ready(self) -> ReadyShards | None:
        """The shards of `source=shards`."""
        return ReadyShards(self.path, self.cache_dir, "vision") if self.source == "shards" else None

    def origin(self) -> Origin:
        """The source as it is on this machine now."""
        if self.source == "folder":
            return folder_origin(Path(self.path))
        if self.source == "webdataset":
            return webdataset_origin(self.path)
        return digits.digits_origin() if self.source == "digits" else openmoji.openmoji_origin()

    def class_names(self) -> tuple[str, ...]:
        """In the order of their numbers; numbers where the source has no names."""
        if self.source == "folder":
            return tuple(image_folder(Path(self.path)).classes)
        if self.source == "webdataset":
            return tuple(map(str, range(self.classes)))
        return digits.CLASSES if self.source == "digits" else openmoji.CLASSES

    def pictures(self) -> Iterable[Picture]:
        """All of the source's, scaled."""
        if self.source == "folder":
            return folder_pictures(Path(self.path), self.size)
        if self.source == "digits":
            return digits.digits_pictures(self.size)
        if self.source == "openmoji":
            return openmoji.openmoji_pictures(self.size)
        return webdataset_pictures(self.path, self.size)

    def folder(self) -> Path:
        """Where this data set is, or will be: the name holds a hash of all that determines it."""
        if (ready := self.ready()) is not None:
            return ready.folder()
        key = {"format": FORMAT, **asdict(self), "versions": self.origin().versions}
        del key["cache_dir"], key["path"]  # its content counts, not its place
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return Path(self.cache_dir).absolute() / f"vision-{self.source}-{digest[:16]}"

    def prepare(self) -> Path:
        """Make the shards where they do not exist yet; safe from many processes at once.

        Raises:
            ValueError: the source has other classes than `classes`, or too few pictures.
        """
        if (ready := self.ready()) is not None:
            folder = ready.prepare({"size": self.size})
            check_classes(self, read_manifest(folder).info["classes"])
            return folder
        return build_once(self.folder(), partial(_build, self))


def check_classes(data: VisionData, names: Sequence[str]) -> None:
    """Refuse another number of classes than the data has."""
    if len(names) != data.classes:
        raise ValueError(
            f"task.data.classes is {data.classes}, but source {data.source} has {len(names)} "
            f"({', '.join(names[:8])}): set task.data.classes={len(names)}"
        )


def _build(data: VisionData, folder: Path) -> None:
    names = data.class_names()
    check_classes(data, names)
    pictures = unique(data.pictures())
    if wrong := sorted({one.label for one in pictures} - set(range(data.classes))):
        raise ValueError(
            f"task.data.classes is {data.classes}, but there are pictures of class {wrong[-1]}: "
            f"set task.data.classes={wrong[-1] + 1} or more"
        )
    held_out = [one for one in pictures if is_validation(one, VALIDATION_PERCENT)]
    train = [one for one in pictures if not is_validation(one, VALIDATION_PERCENT)]
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

    groups = Groups(
        names,
        train=in_shard_order(_labels(train), 1, data.num_shards),
        validation=in_shard_order(_labels(held_out), 1, VALIDATION_SHARDS),
    )
    info = {
        "task": "vision",
        **asdict(data.origin()),
        "size": data.size,
        "classes": list(names),
        "groups": list(names),
        "encoded_by": {"pillow": PIL.__version__},
        "pictures": {"train": len(train), "validation": len(held_out)},
    }
    write_manifest(folder, Manifest(**shards, info=info, files=groups.write(folder)))


def _labels(pictures: list[Picture]) -> np.ndarray:
    return np.array([one.label for one in pictures], dtype=np.int16)


def _records(pictures: list[Picture]) -> list[dict[str, object]]:
    return [{"png": one.png, "cls": one.label} for one in pictures]
