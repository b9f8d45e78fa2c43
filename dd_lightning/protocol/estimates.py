"""Moving averages and what is decided from them: the grace window and the in-flight bound.

Times are seconds. `protocol.md`, "Grace window" and "Rounds"; the paper's rule is eq. 3.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dd_lightning.algorithm import grace_window

ALPHA = 0.125
KEPT_STEPS = 2048  # whose durations the quantiles are of
OUTLIER = 5.0  # step durations above so many running medians are left out


@dataclass(slots=True)
class MovingAverage:
    """Exponential moving average; the first sample seeds it."""

    value: float | None = None

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.value = sample if self.value is None else self.value + ALPHA * (sample - self.value)


@dataclass(slots=True)
class StepTime:
    """A learner's step duration: moving average without outliers, and its quantiles."""

    average: MovingAverage = field(default_factory=MovingAverage)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=31))
    kept: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))

    def add(self, seconds: float) -> None:
        """One finished step."""
        self.kept.append(seconds)
        if self.recent and seconds > OUTLIER * statistics.median(self.recent):
            # a pause must not become a step time, but a learner that stays slow must: the
            # running median follows it after half a window
            self.recent.append(seconds)
            return
        self.recent.append(seconds)
        self.average.add(seconds)

    @property
    def value(self) -> float | None:
        """ξ_step of this learner."""
        return self.average.value

    def quantile(self, q: float) -> float | None:
        """Of the last 2048 steps, outliers included."""
        return quantile(self.kept, q)


def quantile(values: Iterable[float], q: float) -> float | None:
    """The value that a share `q` of them does not exceed; None of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else None


@dataclass(slots=True)
class Lateness:
    """How late after the quorum a member contributes: mean and mean absolute deviation."""

    mean: MovingAverage = field(default_factory=MovingAverage)
    deviation: MovingAverage = field(default_factory=MovingAverage)

    def add(self, seconds: float) -> None:
        """One contribution, in time or late; 0 at or before the quorum."""
        if self.mean.value is not None:
            self.deviation.add(abs(seconds - self.mean.value))
        self.mean.add(seconds)

    @property
    def bound(self) -> float | None:
        """Mean + 3 mean absolute deviations; None without a sample."""
        if self.mean.value is None:
            return None
        return self.mean.value + 3.0 * (self.deviation.value or 0.0)


def lateness_window(bounds: Iterable[float | None], cap: float) -> float:
    """ℓ: the largest bound that does not exceed `cap`; a member without a sample counts as cap."""
    return max((cap if b is None else b for b in bounds if b is None or b <= cap), default=0.0)


@dataclass(slots=True)
class GraceEstimator:
    """ξ_quorum and ξ_sync of the run, and the window they give."""

    rule: str
    safety: float
    overlap: int
    cap_steps: float
    quorum: MovingAverage = field(default_factory=MovingAverage)
    sync: MovingAverage = field(default_factory=MovingAverage)
    spent: MovingAverage = field(default_factory=MovingAverage)

    def window(
        self, fastest_step: float | None, median_step: float | None, bounds: list[float | None]
    ) -> float:
        """The grace window of a round whose quorum stands, in seconds.

        Args:
            fastest_step: ξ_step of the fastest contributor at the quorum.
            median_step: median over training learners of ξ_step.
            bounds: `Lateness.bound` of every member of the roster still to contribute.
        """
        if self.rule == "none" or median_step is None:
            return 0.0
        cap = self.cap_steps * median_step
        paper = grace_window(
            self.overlap,
            fastest_step if fastest_step is not None else median_step,
            self.quorum.value or 0.0,
            self.sync.value or 0.0,
            self.safety,
            cap,
        )
        if self.rule == "paper":
            return paper
        return min(max(paper, lateness_window(bounds, cap)), cap)


def in_flight_bound(
    rho: float | None,
    step: float | None,
    grace: float,
    transfer: float,
    sync_every: int,
    fragments: int,
) -> int:
    """`max_in_flight: auto`: clamp(⌈(ρ + ξ_step + grace)/max(ξ_step·H/P, ξ_x)⌉, 1, P).

    Before the first samples of ρ or ξ_step it is 1.
    """
    if rho is None or step is None:
        return 1
    interval = max(step * sync_every / fragments, transfer)
    if interval <= 0:
        return fragments
    return max(1, min(fragments, math.ceil((rho + step + grace) / interval)))
