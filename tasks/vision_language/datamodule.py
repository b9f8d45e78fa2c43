"""Pictures and their names as batches, from the shards of `VisionLanguageData`."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dd_lightning.tasks.data import read_shard
from dd_lightning.tasks.vision import VisionDataModule
from dd_lightning.tasks.vision.datamodule import normalised, to_pixels

from .names import END, Tokenizer
from .prepare import VisionLanguageData

WHITE = 1.0  # a normalised pixel: what lies around a drawing


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture `[3, S, S]` uint8 and the ids of its name; `key` is the same for the same ids."""

    pixels: Tensor
    ids: tuple[int, ...]
    num_bytes: int
    key: int


def read_named(path: Path, words: tuple[str, ...], text_length: int) -> list[Sample]:
    """The samples of one shard."""
    tokenizer = Tokenizer(words)
    samples = []
    for record in read_shard(path):
        ids = tokenizer.encode(record["txt"].decode(), text_length)
        digest = hashlib.sha256(str(ids).encode()).digest()
        key = int.from_bytes(digest[:8], "big", signed=True)
        num_bytes = tokenizer.num_bytes(ids)
        samples.append(Sample(to_pixels(record["png"]), tuple(ids), num_bytes, key))
    return samples


def to_batch(samples: Sequence[Sample]) -> dict[str, Tensor]:
    """`pixels` `[B, 3, S, S]` float32 in -1..1; int64: `ids` `[B, longest]`, filled up with `END`,
    `end` `[B]` (its first place), `num_bytes` `[B]` and `name` `[B]`."""
    longest = max(len(one.ids) for one in samples)
    ids = torch.full((len(samples), longest), END)
    for row, one in zip(ids, samples, strict=True):
        row[: len(one.ids)] = torch.tensor(one.ids)
    return {
        "pixels": normalised([one.pixels for one in samples]),
        "ids": ids,
        "end": torch.tensor([len(one.ids) - 1 for one in samples]),
        "num_bytes": torch.tensor([one.num_bytes for one in samples]),
        "name": torch.tensor([one.key for one in samples]),
    }


class VisionLanguageDataModule(VisionDataModule):
    """Batches of `to_batch`; training pictures are shifted, and mirrored if `flip`.

    Args:
        **settings: those of `VisionDataModule`, and the fields of `VisionLanguageData`.
    """

    settings = VisionLanguageData
    fill = WHITE

    def tokenizer(self) -> Tokenizer:
        """That of the prepared data."""
        return Tokenizer(self.manifest().info["words"])

    def splits(self) -> tuple[str, ...]:
        return ("iid",)

    def reader(self) -> Callable[[Path], Sequence[Any]]:
        words = self.tokenizer().words
        return partial(read_named, words=words, text_length=self.data.text_length)

    def collate(self) -> Callable[[list[Any]], Any]:
        return to_batch
