"""Goodput and uptime of fleets under failures: a discrete-event simulation without training.

Learners fail by themselves (K = 1 with a grace window: nobody waits), so a fleet of M learners is M
simulations of a learner with a share of the chips. What a failure loses here is time only: the dead
time of its learner, and the failed slice until it is back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dd_lightning.simulate.failure_sources import Failure, FailureTrace, poisson
from dd_lightning.simulate.fleet_parameters import FleetParameters

INFINITY = float("inf")


@dataclass(slots=True)
class LearnerTime:
    """One learner's simulated time: `good_s` counts each chip's share, `dead` is (from, to)."""

    seconds: float
    good_s: float = 0.0
    failures: int = 0
    dead: list[tuple[float, float]] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        """Share of chip time in which chips computed."""
        return self.good_s / self.seconds


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One row of the table; goodput and uptime in percent."""

    learners: int
    elastic: bool
    chips: int
    goodput: float
    uptime: float


def simulate_rigid(failures: Iterator[Failure], parameters: FleetParameters) -> LearnerTime:
    """A learner without elasticity: it stands still until the failed slice is back, and restarts.
    Chips that stand still do not fail."""
    result = LearnerTime(parameters.seconds)
    now, shift = 0.0, 0.0  # what stood still moves later failures back
    for when, recovery in failures:
        at = when + shift
        if at >= parameters.seconds:
            break
        result.good_s += at - now
        result.failures += 1
        back = at + parameters.downscale_s + recovery + parameters.upscale_s
        result.dead.append((at, back))
        shift += back - at
        now = back
        if now >= parameters.seconds:
            break
    result.good_s += max(0.0, parameters.seconds - now)
    return result


class _ElasticLearner:
    """State of a learner that goes on without its failed slices and takes them back in batches."""

    def __init__(
        self, failures: Iterator[Failure], slices: float, parameters: FleetParameters
    ) -> None:
        self._failures, self._slices, self._parameters = failures, slices, parameters
        self._result = LearnerTime(parameters.seconds)
        self._away = 0  # failed slices that have not joined again
        self._returns: list[float] = []
        self._waiting = 0  # returned, to join at the next upscale
        self._upscale_at = INFINITY
        self._next, self._recovery = next(failures, (INFINITY, 0.0))

    def run(self) -> LearnerTime:
        """To the end of the simulated time."""
        now, end = 0.0, self._parameters.seconds
        while now < end:
            returned = self._returns[0] if self._returns else INFINITY
            at = min(self._next, self._upscale_at, returned, end)
            self._result.good_s += (at - now) * max(0.0, 1 - self._away / self._slices)
            now = at
            if at == end:
                break
            if at == returned and at < min(self._next, self._upscale_at):
                self._take_back(now)
            else:
                now = self._stand_still(now)
        return self._result

    def _take_back(self, now: float) -> None:
        """Slices that are back by now wait for the next upscale."""
        while self._returns and self._returns[0] <= now:
            heapq.heappop(self._returns)
            self._waiting += 1
            if self._upscale_at == INFINITY:
                self._upscale_at = now + self._parameters.upscale_batch_s

    def _stand_still(self, now: float) -> float:
        """A downscale (a slice has failed) or an upscale; failures meanwhile are absorbed."""
        if self._next <= now:
            back = now + self._parameters.downscale_s
        else:
            back = now + self._parameters.upscale_s
            self._away -= self._waiting
            self._waiting, self._upscale_at = 0, INFINITY
        while self._next <= now or self._next < back:
            self._away += 1
            self._result.failures += 1
            heapq.heappush(self._returns, self._next + self._recovery)
            self._next, self._recovery = next(self._failures, (INFINITY, 0.0))
        self._result.dead.append((now, back))
        self._take_back(back)
        return back


def simulate_elastic(
    failures: Iterator[Failure], slices: float, parameters: FleetParameters
) -> LearnerTime:
    """A learner that goes on without failed slices: a downscale is a dead time that absorbs
    further failures, upscales are batched."""
    return _ElasticLearner(failures, max(1.0, slices), parameters).run()


def simulate_fleet(
    learners: int,
    chips: int,
    elastic: bool,
    parameters: FleetParameters,
    seed: int,
    trace: FailureTrace | None = None,
) -> FleetRow:
    """One row: M learners of chips/M chips each.

    Raises:
        ValueError: no learner, or fewer chips than learners.
    """
    if learners < 1 or chips < learners:
        raise ValueError(
            f"learners is {learners}, chips is {chips}; allowed: at least 1 learner, and as many "
            "chips as learners."
        )
    share = chips / learners
    seeds = np.random.SeedSequence(seed).spawn(learners)
    times = []
    for index, own in enumerate(seeds):
        failures = (
            poisson(share, parameters, np.random.default_rng(own))
            if trace is None
            else trace.of_learner(index, learners)
        )
        if elastic:
            times.append(simulate_elastic(failures, share / parameters.slice_chips, parameters))
        else:
            times.append(simulate_rigid(failures, parameters))
    goodput = sum(time.goodput for time in times) / learners
    return FleetRow(learners, elastic, chips, 100 * goodput, 100 * uptime(times))


def uptime(times: Sequence[LearnerTime]) -> float:
    """Share of the time in which at least one learner computes."""
    seconds = times[0].seconds
    edges = []
    for time in times:
        for start, end in time.dead:
            edges += [(start, 1), (min(end, seconds), -1)]
    edges.sort()
    down_s, dead, since = 0.0, 0, 0.0
    for at, change in edges:
        if dead == len(times):
            down_s += at - since
        dead += change
        since = at
    return 1 - down_s / seconds
