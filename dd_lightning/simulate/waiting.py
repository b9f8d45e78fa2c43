"""What waiting for each other costs learners of different speed, and what temporary chips bring."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROUNDS = 20_000


def goodput_of_quorum(
    speeds: Sequence[float], quorum: int, jitter: float, seed: int = 0, waits: bool = True
) -> float:
    """Share of time spent stepping when each round ends with its `quorum`-th learner.

    Args:
        speeds: seconds per round of each learner, relative.
        quorum: K, 1 to the number of learners.
        jitter: standard deviation of a round's length, as a share of it.
        waits: `wait: overlap`, where nobody starts the next round before this one has ended;
            False: `wait: never`, where nobody ever waits.

    Raises:
        ValueError: a quorum that these learners cannot reach.
    """
    if not 1 <= quorum <= len(speeds):
        raise ValueError(f"quorum is {quorum}; allowed: 1 to {len(speeds)} (the learners).")
    if not waits:
        return 1.0
    rng = np.random.default_rng(seed)
    noise = 1 + jitter * rng.standard_normal((ROUNDS, len(speeds)))
    lengths = np.asarray(speeds) * np.maximum(noise, 0.01)
    ends = np.sort(lengths, axis=1)[:, quorum - 1 : quorum]
    # who is slower than the round goes on into the next one and has not waited
    return float((np.minimum(lengths, ends) / ends).mean())


def scavenged_time(extra: float, start: float = 0.5, slowdown: float = 1.0) -> float:
    """Wall time of a fixed amount of work when `extra` × the chips join at `start`.

    Args:
        extra: temporary chips as a share of the permanent ones.
        start: when they come, as a share of the run without them.
        slowdown: time a step takes with them, relative to what their number promises: 1 for
            learners that join and leave by themselves.

    Returns:
        Wall time relative to the run without them.

    Raises:
        ValueError: extra below 0, or start outside 0 to 1.
    """
    if extra < 0 or not 0 <= start <= 1:
        raise ValueError(
            f"extra is {extra}, start is {start}; allowed: extra >= 0 and start from 0 to 1."
        )
    return start + (1 - start) * slowdown / (1 + extra)
