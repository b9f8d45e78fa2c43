"""What the readers of a tape share: dispatch by event name, and numbers that JSON can carry."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Event = Mapping[str, Any]
Round = tuple[int, int]  # (epoch, round number)


class Observer:
    """Reads a tape in one pass: an event `x` goes to the method `on_x`, others are ignored."""

    def feed(self, event: Event) -> None:
        """Take the next event of the tape."""
        handler = getattr(self, f"on_{event['event']}", None)
        if handler is not None:
            handler(event)


def finite(value: Any) -> float | None:
    """`value` as a finite float, else None (null on the tape, NaN, infinity, text)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def round_key(event: Event) -> Round:
    """What names a round on a tape."""
    return event["epoch"], event["round"]


def merge_count(version: Any) -> int:
    """n of a version, which stands on a tape as [epoch, n] or as n alone."""
    return int(version[-1] if isinstance(version, Sequence) else version)


def learner_ids(members: Iterable[Any]) -> list[str]:
    """Ids of a roster or of contributors, written as ids or as [id, generation]."""
    return [str(member if isinstance(member, str | int) else member[0]) for member in members]


def spread(counts: Sequence[int]) -> dict[str, float | None]:
    """`min`, `mean` and `max`; all None without a count."""
    if not counts:
        return {"min": None, "mean": None, "max": None}
    return {"min": min(counts), "mean": sum(counts) / len(counts), "max": max(counts)}
