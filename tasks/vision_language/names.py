"""Names as token ids: a table of frequent words before bytes, so any text has ids and a way back.

Ids 0..255 are bytes (0 ends a name), higher ones the words of the training names.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

END = 0
BYTES = 256
PIECE = re.compile(rb" ?[^ ]+| +")  # a word with the space before it
LEAST_COUNT = 2  # a word that is there once has nobody to be learnt from


class Tokenizer:
    """Text to ids and back.

    Args:
        words: pieces with ids of their own, 256 upwards.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._pieces = [word.encode() for word in self.words]
        self._ids = {piece: BYTES + index for index, piece in enumerate(self._pieces)}

    @classmethod
    def learn(cls, names: Iterable[str], vocabulary: int) -> "Tokenizer":
        """The most frequent pieces of `names`, at most `vocabulary` - 256 of them."""
        counts = Counter(piece for name in names for piece in PIECE.findall(name.encode()))
        frequent = [piece for piece in counts if counts[piece] >= LEAST_COUNT and len(piece) > 1]
        frequent.sort(key=lambda piece: (-counts[piece], piece))
        return cls([piece.decode() for piece in frequent[: vocabulary - BYTES]])

    def encode(self, name: str, length: int) -> list[int]:
        """At most `length` ids, of which the last is `END`; what does not fit is cut off."""
        ids: list[int] = []
        for piece in PIECE.findall(name.encode().replace(b"\0", b" ")):
            known = self._ids.get(piece)
            ids += list(piece) if known is None else [known]
        return [*ids[: length - 1], END]

    def decode(self, ids: Iterable[int]) -> str:
        """The text before the first `END`; bytes that are no UTF-8 become U+FFFD."""
        return self._bytes(ids).decode(errors="replace")

    def num_bytes(self, ids: Iterable[int]) -> int:
        """Length in UTF-8 of what `ids` stand for."""
        return len(self._bytes(ids))

    def _bytes(self, ids: Iterable[int]) -> bytes:
        pieces = []
        for one in ids:
            if one == END:
                break
            pieces.append(bytes([one]) if one < BYTES else self._pieces[one - BYTES])
        return b"".join(pieces)
