"""Webdataset shards and the manifest that says exactly what is in them.

A shard is an uncompressed tar without times or user names, so building twice gives the same bytes.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import webdataset as wds

MANIFEST = "manifest.json"
SCHEMA = 1
# Reaching a position inside a shard means reading the shard: more records make resuming slow.
MAX_RECORDS_PER_SHARD = 1000

Record = Mapping[str, Any]  # what webdataset calls a sample: field name to value


@dataclass(frozen=True, slots=True)
class Shard:
    """One tar file of a data set; a record may hold several training samples."""

    file: str
    records: int
    samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a prepared folder holds; `info` is the task's own (source, licence, versions, ...),
    `files` the checksums (sha256) of files beside the shards, by name."""

    train: tuple[Shard, ...]
    validation: tuple[Shard, ...]
    info: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)


def deal(num_records: int, num_shards: int) -> list[range]:
    """The records of each shard, by their numbers: in turns, over `num_shards` or its next multiple
    where a shard would exceed 1000 records."""
    num_shards *= -(-num_records // (num_shards * MAX_RECORDS_PER_SHARD))
    return [range(num_records)[index::num_shards] for index in range(num_shards)]


def write_shards(
    folder: Path,
    split: str,
    records: Sequence[Record],
    num_shards: int,
    count_samples: Callable[[Record], int] = lambda record: 1,
) -> tuple[Shard, ...]:
    """Deal `records` over `num_shards` shards whose sizes differ by at most one record.

    Args:
        records: bytes are stored as they are, webdataset encodes other values by field name.
        num_shards: raised to its next multiple where a shard would exceed 1000 records.
        count_samples: training samples in a record.

    Raises:
        ValueError: fewer records than shards.
    """
    if len(records) < num_shards:
        raise ValueError(
            f"{split}: {len(records)} records do not fill {num_shards} shards; "
            "use fewer shards or more data"
        )
    shards = []
    for index, numbers in enumerate(deal(len(records), num_shards)):
        path, dealt = folder / f"{split}-{index:05d}.tar", [records[i] for i in numbers]
        _write_tar(path, dealt)
        samples = sum(count_samples(record) for record in dealt)
        shards.append(Shard(path.name, len(dealt), samples, path.stat().st_size, _sha256(path)))
    return tuple(shards)


def _write_tar(path: Path, records: Sequence[Record]) -> None:
    with path.open("wb") as file, wds.TarWriter(file, user="", group="", mtime=0) as writer:
        for index, record in enumerate(records):
            # no dot in a key: webdataset takes what follows it as the extension
            writer.write({"__key__": f"{index:06d}", **record})


def read_shard(path: Path) -> list[dict[str, bytes]]:
    """All records of one shard in stored order, each field as raw bytes."""
    with path.open("rb") as file:  # opened here: webdataset leaves closing to the collector
        members = wds.tariterators.tar_file_expander([{"url": path.name, "stream": file}])
        grouped = list(wds.tariterators.group_by_keys(members))
    return [{k: v for k, v in record.items() if not k.startswith("__")} for record in grouped]


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json`; the last file of a build, so its presence means complete."""
    content = {
        "schema": SCHEMA,
        **manifest.info,
        "files": dict(manifest.files),
        "train": [asdict(shard) for shard in manifest.train],
        "validation": [asdict(shard) for shard in manifest.validation],
    }
    (folder / MANIFEST).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_manifest(folder: Path, verify: bool = False) -> Manifest:
    """Read a prepared folder's manifest.

    Args:
        verify: also compare every shard and file with its checksum (reads all of them).

    Raises:
        ValueError: not prepared, written by another version, or a file changed since.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(
            f"no prepared data in {folder}: run scripts/prepare_data.py with the same task.data "
            "settings, or call the datamodule's prepare_data() first"
        )
    manifest = parse_manifest(path.read_bytes(), str(folder))
    if verify:
        shards = manifest.train + manifest.validation
        recorded = {**{shard.file: shard.sha256 for shard in shards}, **manifest.files}
        for name, digest in recorded.items():
            file = folder / name
            if not file.is_file() or _sha256(file) != digest:
                raise ValueError(
                    f"{file} is not what the manifest recorded (sha256 {digest[:12]}...): "
                    f"delete {folder} and prepare again"
                )
    return manifest


def parse_manifest(content: bytes, folder: str) -> Manifest:
    """A manifest from the content of its file.

    Args:
        folder: where it comes from, for messages.

    Raises:
        ValueError: written by another version, or no manifest.
    """
    try:
        found = json.loads(content)
        schema = found.pop("schema", None)
        if schema != SCHEMA:
            raise ValueError(
                f"{MANIFEST} in {folder} is of schema {schema!r} and not of schema {SCHEMA}: "
                "delete that folder and prepare again"
            )
        train, validation = (
            tuple(Shard(**entry) for entry in found.pop(split)) for split in ("train", "validation")
        )
        manifest = Manifest(train, validation, found, found.pop("files", {}))
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{MANIFEST} in {folder} is none of ours ({error!r})") from error
    names = [*(shard.file for shard in train + validation), *manifest.files]
    if strange := [one for one in names if Path(one).name != one or one.startswith(".")]:
        raise ValueError(f"{MANIFEST} in {folder} names a file outside of it: {strange[0]!r}")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
