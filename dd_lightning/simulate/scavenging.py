"""What temporary chips bring: the wall time of a fixed amount of work as capacity comes and goes.

Decoupled, temporary chips are learners of their own: they add their rate, and what they lose when
they are taken away again is theirs. Data-parallel, every chip takes part in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

REPEATED = 2.125
"""Work that data-parallel repeats per unit of work and temporary share, calibrated on the paper's
+25% alone; its other three capacities are predictions."""

INFINITY = float("inf")

Capacity = Sequence[tuple[float, float]]
"""(from when on, temporary chips as a share of the permanent ones); times are relative to the run
without temporary chips."""


def decoupled_slowdown(extra: float) -> float:
    """Of a step with temporary chips, relative to what their number promises: none."""
    return 1.0


def data_parallel_slowdown(extra: float, repeated: float = REPEATED) -> float:
    """Of a step of elastic data-parallel with temporary chips.

    Temporary chips are preempted at a rate that grows with their number, r·extra. Each time all
    chips stop, reconfigure and repeat the c steps since the last checkpoint. The global batch is
    fixed (the rule that keeps the loss curve), so that a step, and with it what is repeated, takes
    1/(1 + extra) of its time without them: slowdown 1 + r·c·extra/(1 + extra).
    """
    return 1 + repeated * extra / (1 + extra)


def wall_time(capacity: Capacity, slowdown: Callable[[float], float] = decoupled_slowdown) -> float:
    """Wall time of the work that takes 1 without temporary chips.

    Raises:
        ValueError: extra below 0, or times that do not rise from 0.
    """
    times = [at for at, _ in capacity]
    rising = all(before < after for before, after in pairwise((*times, INFINITY)))
    extras = all(0 <= extra < float("inf") for _, extra in capacity)
    if not extras or not rising or min(times, default=0.0) < 0:
        raise ValueError(
            f"capacity is {list(capacity)}; allowed: (time, extra) with rising times and extra "
            "from 0."
        )
    now, left, rate = 0.0, 1.0, 1.0
    for at, extra in capacity:
        if left <= (at - now) * rate:
            break
        left -= (at - now) * rate
        now, rate = at, (1 + extra) / slowdown(extra)
    return now + left / rate


def read_capacity(text: str) -> list[tuple[float, float]]:
    """From `0.5:1,0.8:0`: all chips again from the middle on, gone at 0.8.

    Raises:
        ValueError: not of this form.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return [(float(at), float(extra)) for at, extra in pairs]
    except ValueError:
        raise ValueError(
            f"--scavenge is {text!r}; allowed: time:extra,..., as 0.5:1,0.8:0 (times as a share of "
            "the run without temporary chips, chips as a share of the permanent ones)."
        ) from None
