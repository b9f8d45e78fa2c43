"""Byte sequences for language modelling, from the shards of `prepare`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dd_lightning.tasks.data import ShardDataModule, read_shard

from .prepare import TextData


def read_sequences(path: Path, sequence_length: int) -> np.ndarray:
    """The sequences of one shard, `[samples, sequence_length + 1]` uint8."""
    text = b"".join(record["bin"] for record in read_shard(path))
    return np.frombuffer(text, dtype=np.uint8).reshape(-1, sequence_length + 1)


def to_batch(sequences: Sequence[np.ndarray]) -> dict[str, Tensor]:
    """Inputs and labels, each `[B, S]` int64, from B sequences of S+1 bytes."""
    ids = torch.from_numpy(np.stack(sequences).astype(np.int64))
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class TextDataModule(ShardDataModule):
    """Batches `{"input_ids", "labels"}` of bytes; arguments are those of `ShardDataModule`, and the
    fields of `TextData`: source, path, sequence_length, max_bytes, ..."""

    settings = TextData

    def splits(self) -> tuple[str, ...]:
        return ("iid", "era" if self.data.source == "sotu" else "group", "dirichlet")

    def reader(self) -> Callable[[Path], Sequence[Any]]:
        return partial(read_sequences, sequence_length=self.data.sequence_length)

    def collate(self) -> Callable[[list[Any]], Any]:
        return to_batch
