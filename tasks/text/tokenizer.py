"""What a token of the text task is: a byte, or a byte pair merged by the package `tokenizers`.

Byte pairs are learned from the training text alone. Text goes through the package as Latin-1, one
character a byte, so that every text of any encoding comes back as it was.
"""

import importlib.metadata
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("bytes", "bpe")
BYTES = 256  # vocabulary of "bytes"; the first tokens of "bpe"
MAX_VOCABULARY = 2**16  # tokens are stored in 16 bits
FILE = "tokenizer.json"  # in the prepared folder
# As in GPT-2, of bytes: a space belongs to the word after it; letters, digits and others apart.
WORDS = r" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^ \t\r\nA-Za-z0-9\x80-\xff]+|[ \t\r\n]+"


def check_vocabulary(kind: str, vocabulary: int) -> None:
    """Raise ValueError unless tokenizer `kind` can have so many tokens."""
    if kind not in KINDS:
        raise ValueError(f"task.data.tokenizer is {kind!r}, allowed are {KINDS}")
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int):
        raise ValueError(f"task.data.vocabulary is {vocabulary!r}, allowed are integers")
    if kind == "bytes" and vocabulary != BYTES:
        raise ValueError(
            f"task.data.vocabulary is {vocabulary} with task.data.tokenizer=bytes: a byte has "
            f"{BYTES} values; for another vocabulary use tokenizer=bpe"
        )
    if kind == "bpe" and not BYTES < vocabulary <= MAX_VOCABULARY:
        raise ValueError(
            f"task.data.vocabulary is {vocabulary} with task.data.tokenizer=bpe, allowed are "
            f"{BYTES + 1}..{MAX_VOCABULARY}, as task.data.vocabulary=1024"
        )


def versions(kind: str) -> dict[str, str]:
    """What else decides the tokens.

    Raises:
        ValueError: tokenizers is missing.
    """
    if kind == "bytes":
        return {}
    try:
        return {"tokenizers": importlib.metadata.version("tokenizers")}
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            "task.data.tokenizer=bpe needs the package tokenizers, which is missing: "
            "pip install 'dd-lightning[text]'"
        ) from error


class ByteTokenizer:
    """A token is a byte."""

    dtype = np.dtype("u1")

    def encode(self, text: bytes) -> np.ndarray:
        """Tokens of `text`, `[tokens]`."""
        return np.frombuffer(text, dtype=self.dtype)

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Bytes that the tokens stand for."""
        return len(tokens)


@dataclass(frozen=True, slots=True)
class BytePairTokenizer:
    """Tokens of one byte or more; the first 256 are the bytes themselves."""

    model: Any  # tokenizers.Tokenizer
    dtype = np.dtype("<u2")

    @classmethod
    def learn(cls, texts: Iterable[bytes], vocabulary: int) -> "BytePairTokenizer":
        """Merge the most frequent pairs of `texts`, ties by their numbers: always the same.

        Raises:
            ValueError: the texts have too few pairs for so many tokens.
        """
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

        model = Tokenizer(models.BPE())
        model.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
        alphabet = [chr(byte) for byte in range(BYTES)]
        trainer = trainers.BpeTrainer(
            vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False
        )
        model.train_from_iterator((text.decode("latin-1") for text in texts), trainer)
        if (found := model.get_vocab_size()) != vocabulary:
            raise ValueError(
                f"task.data.vocabulary is {vocabulary}, but the training text gives only {found} "
                f"tokens: set task.data.vocabulary={found} or add text"
            )
        return cls(model)

    @classmethod
    def load(cls, folder: Path) -> "BytePairTokenizer":
        """Of a prepared folder."""
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_file(str(folder / FILE)))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, which is also what `load` and the package read."""
        (folder / FILE).write_text(self.model.to_str(pretty=True) + "\n", encoding="utf-8")

    def encode(self, text: bytes) -> np.ndarray:
        """Tokens of `text`, `[tokens]`."""
        ids = self.model.encode(text.decode("latin-1"), add_special_tokens=False).ids
        return np.array(ids, dtype=self.dtype)

    def num_bytes(self, tokens: np.ndarray) -> int:
        """Bytes that the tokens stand for."""
        return sum(len(self.model.id_to_token(token)) for token in tokens.tolist())


def token_bytes(folder: Path) -> np.ndarray:
    """How many bytes each token of a prepared folder's byte pairs stands for, `[vocabulary]`."""
    vocabulary = json.loads((folder / FILE).read_text(encoding="utf-8"))["model"]["vocab"]
    lengths = np.zeros(len(vocabulary), dtype=np.int64)
    for token, number in vocabulary.items():
        lengths[number] = len(token)  # a character is a byte
    return lengths
