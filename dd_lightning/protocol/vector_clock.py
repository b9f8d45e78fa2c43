"""Vector clocks: for each fragment, which learner steps its current value contains."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class VectorClock(Mapping[str, int]):
    """Learner id to a count that only grows. Absent means 0.

    `a <= b` holds when every count of `a` is in `b`; two clocks may be neither way round
    (`concurrent`), which is how a value that misses a learner's work is told from an old one.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] | None = None) -> None:
        self._counts = {key: value for key, value in (counts or {}).items() if value > 0}

    def __getitem__(self, learner: str) -> int:
        return self._counts.get(learner, 0)

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._counts))

    def __len__(self) -> int:
        return len(self._counts)

    def advanced(self, learner: str, count: int) -> VectorClock:
        """With `learner` at `count` or where it was, whichever is larger."""
        return VectorClock({**self._counts, learner: max(count, self[learner])})

    def merged(self, other: Mapping[str, int]) -> VectorClock:
        """The smallest clock that contains both."""
        keys = {*self, *other}
        return VectorClock({key: max(self[key], other.get(key, 0)) for key in keys})

    def __le__(self, other: VectorClock) -> bool:
        return all(count <= other[learner] for learner, count in self._counts.items())

    def concurrent(self, other: VectorClock) -> bool:
        """Neither contains the other."""
        return not self <= other and not other <= self
