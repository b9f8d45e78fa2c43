"""Documents cut into sequences of tokens, each with its group, and written as shards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dd_lightning.tasks.data import Shard, in_shard_order, number_groups, write_shards

from .corpus import SEPARATOR, Document
from .tokenizer import BytePairTokenizer, ByteTokenizer

ORDER_SEED = 1
SEQUENCES_PER_RECORD = 16  # a tar spends 1 kB on each record, whatever its size


@dataclass(frozen=True, slots=True)
class Written:
    """Shards of one side of the split, and the group of each sample in their order."""

    shards: tuple[Shard, ...]
    groups: np.ndarray


@dataclass(frozen=True, slots=True)
class Sequences:
    """Cuts documents into windows of `length + 1` tokens.

    Args:
        tokenizer: what makes tokens of text.
        group_names: of all groups, in the order of their numbers; empty: the data has none.
    """

    length: int
    tokenizer: ByteTokenizer | BytePairTokenizer
    group_names: tuple[str, ...]

    def write(
        self, folder: Path, split: str, documents: Sequence[Document], num_shards: int
    ) -> Written:
        """Sequences in an order fixed by the text, so that every shard is an even mixture.

        Raises:
            ValueError: too little text for so many shards.
        """
        tokens, groups = self.joined(documents)
        sequences = list(cut(tokens, self.length))
        if len(sequences) < num_shards:
            raise ValueError(
                f"{split}: {len(sequences)} sequences of {self.length} tokens do not fill "
                f"{num_shards} shards: lower task.data.num_shards or sequence_length, or add text"
            )
        order = np.random.default_rng(ORDER_SEED).permutation(len(sequences))
        size = min(SEQUENCES_PER_RECORD, len(sequences) // num_shards)
        records = [
            {"bin": b"".join(sequences[i].tobytes() for i in order[start : start + size])}
            for start in range(0, len(order), size)
        ]
        record_bytes = sequences[0].nbytes
        shards = write_shards(
            folder, split, records, num_shards, lambda record: len(record["bin"]) // record_bytes
        )
        # of a sequence that spans documents: that of the one in which its first target lies
        firsts = groups[1 :: self.length][: len(sequences)]
        return Written(shards, in_shard_order(firsts[order], size, num_shards))

    def joined(self, documents: Sequence[Document]) -> tuple[np.ndarray, np.ndarray]:
        """All documents' tokens in a row with a separator after each but the last, and the group of
        each token."""
        end = self.tokenizer.encode(SEPARATOR)
        parts = [np.append(self.tokenizer.encode(d.text), end) for d in documents]
        numbers = np.zeros(len(documents), dtype=np.int16)
        if self.group_names:
            numbers = number_groups([d.group for d in documents], self.group_names)
        groups = np.repeat(numbers, [len(part) for part in parts])
        return np.concatenate(parts)[:-1], groups[:-1]


def cut(tokens: np.ndarray, sequence_length: int) -> Iterator[np.ndarray]:
    """Windows of `sequence_length + 1` tokens, each starting on the last one of the window before:
    every token but the first (and a remainder) is a target exactly once."""
    for start in range(0, len(tokens) - sequence_length, sequence_length):
        yield tokens[start : start + sequence_length + 1]
