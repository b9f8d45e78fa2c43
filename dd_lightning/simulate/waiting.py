"""Rounds of a fleet: who contributes, and what waiting for each other costs.

Learners have a speed, a jitter and dead times; a round closes at its K-th contribution and a grace
window later. `wait: never`: whoever has finished its round's work goes on; `overlap`: it stands
still until the round has closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LEAST_SHARE = 0.01  # of its mean: no round's work is shorter
WAITS = ("never", "overlap")

Dead = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class RoundRules:
    """How the rounds of a fleet go.

    Args:
        quorum: K; None: every learner.
        wait: `never` or `overlap`.
        grace_s: a round with its quorum waits at most so long for the others.
        round_s: seconds of work of a round for a learner of speed 1: H inner steps.
        speeds: relative, learner k takes entry k modulo their number.

    Raises:
        ValueError: a rule out of range.
    """

    quorum: int | None = 1
    wait: str = "never"
    grace_s: float = 0.0
    round_s: float = 120.0
    speeds: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if self.quorum is not None and self.quorum < 1:
            raise ValueError(f"quorum is {self.quorum}; allowed: 1 or more, or all.")
        if self.wait not in WAITS:
            raise ValueError(f"wait is {self.wait!r}; allowed: {' | '.join(WAITS)}.")
        if not 0 <= self.grace_s < float("inf"):
            raise ValueError(f"grace_s is {self.grace_s}; allowed: 0 or more.")
        if not 0 < self.round_s < float("inf"):
            raise ValueError(f"round_s is {self.round_s}; allowed: above 0.")
        if not self.speeds or not all(0 < speed < float("inf") for speed in self.speeds):
            raise ValueError(f"speeds is {self.speeds}; allowed: numbers above 0.")

    def quorum_of(self, learners: int) -> int:
        """K of a fleet of so many.

        Raises:
            ValueError: the fleet cannot reach it.
        """
        if self.quorum is not None and self.quorum > learners:
            raise ValueError(
                f"quorum is {self.quorum}; allowed: 1 to {learners} (the learners), or all."
            )
        return learners if self.quorum is None else self.quorum


@dataclass(frozen=True, slots=True)
class Rounds:
    """What came of it: `stepping` is each learner's share of its time alive (not dead, not
    waiting, of the whole), `contributors` the mean of a round."""

    rounds: int
    contributors: float
    stepping: tuple[float, ...]


class _Alive:
    """A learner's clock that stands still while it is dead."""

    def __init__(self, dead: Dead) -> None:
        self._starts = np.array([start for start, _ in dead])
        ends = np.array([end for _, end in dead])
        self._lengths = np.concatenate([[0.0], np.cumsum(ends - self._starts)])
        self._alive_at_starts = self._starts - self._lengths[:-1]
        self._ends = ends

    def read(self, at: float) -> float:
        """Seconds alive until `at`."""
        passed = int(np.searchsorted(self._starts, at))
        over = max(0.0, float(self._ends[passed - 1]) - at) if passed else 0.0
        return at - float(self._lengths[passed]) + over

    def when(self, alive_s: float) -> float:
        """When so many seconds alive are over."""
        return alive_s + float(self._lengths[np.searchsorted(self._alive_at_starts, alive_s)])


def simulate_rounds(
    dead: Sequence[Dead], rules: RoundRules, jitter: float, seconds: float, seed: int
) -> Rounds:
    """Play rounds until `seconds` are over.

    Args:
        dead: of each learner, (from, to) in order.
        jitter: standard deviation of a round's work, as a share of it.

    Raises:
        ValueError: a quorum that these learners cannot reach.
    """
    learners = len(dead)
    quorum = rules.quorum_of(learners)
    rng = np.random.default_rng(seed)
    base = [rules.round_s / rules.speeds[k % len(rules.speeds)] for k in range(learners)]
    clocks = [_Alive(own) for own in dead]

    def work(learner: int) -> float:
        return base[learner] * max(LEAST_SHARE, 1 + jitter * rng.standard_normal())

    ends = [clock.when(work(k)) for k, clock in enumerate(clocks)]
    waited = [0.0] * learners
    now, rounds, contributions = 0.0, 0, 0
    while now < seconds:
        close = sorted(ends)[quorum - 1]
        close = min(close + rules.grace_s, max(close, *ends))
        for k, clock in enumerate(clocks):
            if ends[k] > close:
                continue  # goes on into the next round and has not waited
            contributions += 1
            begin = ends[k]
            if rules.wait == "overlap":
                begin = close
                until = clock.read(min(close, seconds))
                waited[k] += max(0.0, until - clock.read(ends[k]))
            while ends[k] <= close:  # a fast one that waits for nobody contributes once
                ends[k] = clock.when(clock.read(begin) + work(k))
                begin = ends[k]
        now, rounds = close, rounds + 1
    stepping = tuple(
        (clock.read(seconds) - lost) / seconds for clock, lost in zip(clocks, waited, strict=True)
    )
    return Rounds(rounds, contributions / rounds, stepping)
