"""Sequences of tokens for language modelling, from the shards of `prepare`."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dd_lightning.tasks.data import ReadyShards, ShardDataModule, read_shard

from .prepare import TextData
from .tokenizer import BytePairTokenizer, ByteTokenizer, token_bytes


def read_sequences(path: Path, sequence_length: int, dtype: np.dtype = ByteTokenizer.dtype) -> Any:
    """The sequences of one shard, `[samples, sequence_length + 1]` of `dtype`."""
    tokens = b"".join(record["bin"] for record in read_shard(path))
    return np.frombuffer(tokens, dtype=dtype).reshape(-1, sequence_length + 1)


def to_batch(
    sequences: Sequence[np.ndarray], token_bytes: np.ndarray | None = None
) -> dict[str, Tensor]:
    """Inputs and labels, each `[B, S]` int64, from B sequences of S+1 tokens.

    Args:
        token_bytes: how many bytes each token stands for; the batch then has `num_bytes`, `[B]`,
            those of the labels. None: a token is a byte.
    """
    tokens = np.stack(sequences)
    ids = torch.from_numpy(tokens.astype(np.int64))
    batch = {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}
    if token_bytes is not None:
        batch["num_bytes"] = torch.from_numpy(token_bytes[tokens[:, 1:]].sum(-1))
    return batch


class TextDataModule(ShardDataModule):
    """Batches `{"input_ids", "labels"}` of tokens; arguments are those of `ShardDataModule`, and
    the fields of `TextData`: source, path, sequence_length, max_bytes, tokenizer, ..."""

    settings = TextData

    def ready(self) -> ReadyShards | None:
        return self.data.ready()

    def splits(self) -> tuple[str, ...]:
        return ("iid", "era" if self.data.source == "sotu" else "group", "dirichlet")

    def reader(self) -> Callable[[Path], Sequence[Any]]:
        kind = ByteTokenizer if self.data.tokenizer == "bytes" else BytePairTokenizer
        return partial(read_sequences, sequence_length=self.data.sequence_length, dtype=kind.dtype)

    def collate(self) -> Callable[[list[Any]], Any]:
        if self.data.tokenizer == "bytes":
            return to_batch
        return partial(to_batch, token_bytes=token_bytes(self.folder))
