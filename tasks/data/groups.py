"""Which group (era, class, library) each sample of a data set is of, known without its shards.

Groups are what non-IID splits deal to data slots, and what validation losses are told apart by.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dd_lightning.tasks.group_losses import GROUP, GROUP_NAMES

from .shards import Manifest, deal

FILES = {"train": "train-groups.npy", "validation": "validation-groups.npy"}
MAX_GROUPS = 2**15  # numbers are stored in 16 bits


@dataclass(frozen=True, slots=True)
class Groups:
    """Names of the groups, and the number of the group of every sample, `[samples]` int16, in the
    order of the shards and in them."""

    names: tuple[str, ...]
    train: np.ndarray
    validation: np.ndarray

    def write(self, folder: Path) -> dict[str, str]:
        """Store the numbers beside the shards; the files' checksums, for the manifest (the names
        are its `info["groups"]`)."""
        written = {}
        for split, file in FILES.items():
            np.save(folder / file, getattr(self, split))
            written[file] = hashlib.sha256((folder / file).read_bytes()).hexdigest()
        return written

    def slugs(self) -> tuple[str, ...]:
        """The names in small letters, digits and underscores."""
        return tuple(re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in self.names)


@dataclass(frozen=True, slots=True)
class GroupedCollate:
    """A batch that also says the group of each sample, from pairs of a sample and its group."""

    collate: Callable[[list[Any]], Any]
    names: tuple[str, ...]

    def __call__(self, pairs: list[tuple[Any, int]]) -> dict[str, Any]:
        samples, numbers = zip(*pairs, strict=True)
        group = {GROUP: torch.tensor(numbers), GROUP_NAMES: self.names}
        return {**self.collate(list(samples)), **group}


def first_groups(groups: Groups | None, count: int) -> list[int]:
    """The group of each of the first `count` validation samples.

    Raises:
        ValueError: the data has no groups, or one of them is not among these samples.
    """
    if groups is None:
        raise ValueError(
            "task.data.group_losses is true, but the data has no groups: allowed is false"
        )
    numbers = groups.validation[:count]
    for number, name in enumerate(groups.names):
        if not (numbers == number).any():
            raise ValueError(
                f"task.data.group_losses is true, but none of the first {count} validation samples "
                f"is of group {name!r}: raise task.data.validation_samples, or use "
                "group_losses=false"
            )
    return numbers.tolist()


def number_groups(groups: Sequence[str], names: Sequence[str]) -> np.ndarray:
    """Numbers of `groups` by their place in `names`, `[len(groups)]` int16."""
    assert len(names) <= MAX_GROUPS, "checked where the names come from"
    numbers = {name: number for number, name in enumerate(names)}
    return np.array([numbers[group] for group in groups], dtype=np.int16)


def in_shard_order(groups: np.ndarray, samples_per_record: int, num_shards: int) -> np.ndarray:
    """The groups of samples in the order in which `write_shards` stores records of so many each
    (the last may have fewer)."""
    starts = range(0, len(groups), samples_per_record)
    records = [groups[start : start + samples_per_record] for start in starts]
    return np.concatenate([records[i] for dealt in deal(len(records), num_shards) for i in dealt])


def read_groups(folder: Path, manifest: Manifest) -> Groups | None:
    """Groups of a prepared folder; None where its source has none."""
    if not manifest.info.get("groups"):
        return None
    arrays = {split: np.load(folder / file) for split, file in FILES.items()}
    return Groups(tuple(manifest.info["groups"]), **arrays)
