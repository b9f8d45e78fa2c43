"""Times measured on a machine that may be busy: noise makes them longer, never shorter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

ATTEMPTS = 10


def assert_times(
    measure: Callable[[], Sequence[float]],
    *expected: Sequence[float],
    rel: float,
    add: float = 0.0,
) -> None:
    """Measure again until the shortest time of each kind is what every `expected` says.

    What is too short fails at once, as noise is no excuse for it; what is too long fails after
    `ATTEMPTS`. A wrong model is wrong in every one of them.

    Args:
        measure: seconds of each kind.
        rel, add: a time t may be off by `rel` * t + `add` seconds.
    """
    least = [max(t - rel * t - add for t in kind) for kind in zip(*expected, strict=True)]
    most = [min(t + rel * t + add for t in kind) for kind in zip(*expected, strict=True)]
    shortest = [math.inf] * len(least)
    for _ in range(ATTEMPTS):
        times = measure()
        assert all(t >= low for t, low in zip(times, least, strict=True)), (
            f"{times} are too short: expected {expected}"
        )
        shortest = [min(pair) for pair in zip(shortest, times, strict=True)]
        if all(t <= high for t, high in zip(shortest, most, strict=True)):
            return
    raise AssertionError(f"the shortest of {ATTEMPTS} are {shortest}: expected {expected}")
