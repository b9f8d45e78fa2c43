"""Bits per byte of text that no model of the text task was trained on, whatever its tokenizer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from dd_lightning.tasks.data import read_manifest
from dd_lightning.tasks.text import TextData
from dd_lightning.tasks.text.datamodule import read_sequences
from dd_lightning.tasks.text.tokenizer import BytePairTokenizer, ByteTokenizer

PASSAGE_BYTES = 1024  # read apart from each other, by every model the same
MAX_BYTES = {"docs": 2_500_000, "sotu": 11_000_000}  # of the sources, before holding out
BATCH = 32


@dataclass(frozen=True, slots=True)
class Reader:
    """How a model reads text: its tokenizer, and the longest window in tokens."""

    tokenizer: ByteTokenizer | BytePairTokenizer
    length: int


def passages(source: str, cache_dir: Path, count: int) -> list[bytes]:
    """The first held-out passages of a source, in an order fixed by the text."""
    data = TextData(
        source=source,
        sequence_length=PASSAGE_BYTES,
        max_bytes=MAX_BYTES[source],
        num_shards=8,
        cache_dir=str(cache_dir),
    )
    folder = data.prepare()
    shards = read_manifest(folder).validation
    found = [
        row.tobytes() for s in shards for row in read_sequences(folder / s.file, PASSAGE_BYTES)
    ]
    return found[:count]


@torch.no_grad()
def bits_per_byte(module: nn.Module, texts: Sequence[bytes], reader: Reader) -> float:
    """Of all tokens but the first of each window, over their bytes.

    Args:
        module: next-token logits `[B, S, V]` of ids `[B, S]`.
    """
    module.eval()
    windows: dict[int, list[np.ndarray]] = {}  # by length: no padding
    for text in texts:
        tokens = reader.tokenizer.encode(text)
        for start in range(0, len(tokens) - 1, reader.length):
            window = tokens[start : start + reader.length + 1]
            windows.setdefault(len(window), []).append(window)
    nats, total = 0.0, 0
    for alike in windows.values():
        for start in range(0, len(alike), BATCH):
            tokens = np.stack(alike[start : start + BATCH])
            ids = torch.from_numpy(tokens.astype(np.int64))
            logits = module(ids[:, :-1])
            nats += float(F.cross_entropy(logits.mT, ids[:, 1:], reduction="sum"))
            total += sum(reader.tokenizer.num_bytes(row) for row in tokens[:, 1:])
    return nats / total / math.log(2)
