"""From documents to shards: split, cut into sequences of bytes, write once under a content key."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from dd_lightning.tasks.data import (
    Groups,
    Manifest,
    Origin,
    ReadyShards,
    build_once,
    check_settings,
    warn_without_effect,
    write_manifest,
)

from .corpus import (
    SOURCES,
    Document,
    by_digest,
    folder_documents,
    folder_origin,
    is_validation,
    unique,
)
from .docstrings import GROUPS, docs_documents, docs_origin
from .sequences import Sequences
from .sotu import ERAS, sotu_documents, sotu_origin
from .tokenizer import BYTES, FILE, BytePairTokenizer, ByteTokenizer, check_vocabulary
from .tokenizer import versions as tokenizer_versions

FORMAT = 2  # raise when the same settings would give other shards
# Of 233 addresses 5% would leave an era with a single one.
VALIDATION_PERCENT = {"docs": 5, "sotu": 10, "folder": 5}
VALIDATION_SHARDS = 2


@dataclass(frozen=True, slots=True)
class TextData:
    """Which text, how much of it, cut how.

    Args:
        source: "docs", "sotu", "folder" (`path`), or "shards": prepared before, at `path`, a folder
            or URL.
        sequence_length: target tokens of a sample; it has one more, the first input.
        max_bytes: text to use; of `sotu` and `folder` a fixed random part of the documents.
        num_shards: training shards, at least data slots x ranks; more where one would be large.
        tokenizer: "bytes", or "bpe": byte pairs, learned from the training text.
        vocabulary: tokens; 256 of "bytes".
        cache_dir: where prepared folders are kept; relative to the current directory.
    """

    source: str = "docs"
    path: str = ""
    sequence_length: int = 128
    max_bytes: int = 2_500_000
    num_shards: int = 64
    tokenizer: str = "bytes"
    vocabulary: int = BYTES
    cache_dir: str = field(default_factory=lambda: os.environ.get("DD_DATA", "data"))

    def __post_init__(self) -> None:
        least = {"sequence_length": 1, "max_bytes": 1, "num_shards": 1}
        check_settings(self, SOURCES, ("folder", "shards"), least)
        check_vocabulary(self.tokenizer, self.vocabulary)
        if self.ready() is not None:
            warn_without_effect(self, "max_bytes", "num_shards")

    @classmethod
    def select(cls, settings: Mapping[str, Any]) -> "TextData":
        """The fields of this class among a datamodule's settings."""
        return cls(**{f.name: settings[f.name] for f in fields(cls) if f.name in settings})

    def ready(self) -> ReadyShards | None:
        """The shards of `source=shards`."""
        return ReadyShards(self.path, self.cache_dir, "text") if self.source == "shards" else None

    def origin(self) -> Origin:
        """The source as it is on this machine now."""
        if self.source == "folder":
            return folder_origin(Path(self.path))
        return docs_origin() if self.source == "docs" else sotu_origin()

    def documents(self) -> Iterable[Document]:
        """The texts used, each once."""
        if self.source == "folder":
            found = folder_documents(Path(self.path))
        else:
            found = docs_documents() if self.source == "docs" else sotu_documents()
        return unique(found, self.max_bytes)

    def group_names(self, documents: Sequence[Document]) -> tuple[str, ...]:
        """Groups in the order of their numbers, also those without a document among these; empty
        where there is but one."""
        if self.source == "folder":
            found = sorted({document.group for document in documents})
            return tuple(found) if len(found) > 1 else ()
        return GROUPS if self.source == "docs" else tuple(ERAS.values())

    def folder(self) -> Path:
        """Where this data set is, or will be: the name holds a hash of all that determines it."""
        if (ready := self.ready()) is not None:
            return ready.folder()
        key = {"format": FORMAT, **asdict(self), "versions": self.origin().versions}
        del key["cache_dir"], key["path"]  # a folder's content counts, not its place
        if self.tokenizer == "bytes":
            del key["tokenizer"], key["vocabulary"]  # nothing to choose
        else:
            key["versions"] |= tokenizer_versions(self.tokenizer)
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return Path(self.cache_dir).absolute() / f"text-{self.source}-{digest[:16]}"

    def prepare(self) -> Path:
        """Make the shards where they do not exist yet; safe from many processes at once."""
        if (ready := self.ready()) is not None:
            alike = ("sequence_length", "tokenizer", "vocabulary")
            return ready.prepare({name: getattr(self, name) for name in alike})
        return build_once(self.folder(), partial(_build, self))


def prepare(data_config: Mapping[str, Any]) -> Path:
    """Make the shards of a `task.data` mapping where they do not exist yet; returns their folder.

    Safe to call from many processes at once. Keys that are not fields of `TextData` (batch size,
    data slot, ...) do not matter here.
    """
    return TextData.select(data_config).prepare()


def _build(data: TextData, folder: Path) -> None:
    documents = by_digest(data.documents())
    percent = VALIDATION_PERCENT[data.source]
    held_out = [d for d in documents if is_validation(d, percent)]
    train = [d for d in documents if not is_validation(d, percent)]
    if not held_out or not train:
        raise ValueError(
            f"{len(documents)} documents of source {data.source} are too few to hold out "
            f"{percent}% of them for validation: add or split files, or raise max_bytes"
        )
    names = data.group_names(documents)
    sequences = Sequences(data.sequence_length, _tokenizer(data, train, folder), names)
    written = {
        "train": sequences.write(folder, "train", train, data.num_shards),
        "validation": sequences.write(folder, "validation", held_out, VALIDATION_SHARDS),
    }
    groups = Groups(names, **{split: one.groups for split, one in written.items()})
    info = {
        "task": "text",
        **asdict(data.origin()),
        "sequence_length": data.sequence_length,
        "tokenizer": data.tokenizer,
        "vocabulary": data.vocabulary,
        "max_bytes": data.max_bytes,
        "documents": {"train": len(train), "validation": len(held_out)},
        "groups": list(names),
    }
    shards = {split: one.shards for split, one in written.items()}
    files = groups.write(folder) if names else {}
    if data.tokenizer != "bytes":
        files[FILE] = hashlib.sha256((folder / FILE).read_bytes()).hexdigest()
    write_manifest(folder, Manifest(**shards, info=info, files=files))


def _tokenizer(
    data: TextData, train: Sequence[Document], folder: Path
) -> ByteTokenizer | BytePairTokenizer:
    """The data's tokenizer; what it learned is kept in `folder`."""
    if data.tokenizer == "bytes":
        return ByteTokenizer()
    learned = BytePairTokenizer.learn((document.text for document in train), data.vocabulary)
    learned.save(folder)
    return learned
