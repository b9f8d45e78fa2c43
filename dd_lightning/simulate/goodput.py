"""Goodput and uptime of fleets under failures: a discrete-event simulation without training.

Learners fail by themselves, so a fleet of M learners is M simulations of a learner with a share of
the chips; where they wait for each other, rounds are played on their dead times (`waiting.py`).
A failure loses the dead time of its learner, its step in progress, and its slice until it is back.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dd_lightning.simulate.failure_sources import Failure, FailureTrace, poisson
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.waiting import RoundRules, Rounds, simulate_rounds

INFINITY = float("inf")
MOST_EVENTS = 1e8  # failures, or rounds of all learners: hours of simulation
NEVER: Failure = (INFINITY, 0.0, 1.0)


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

    @property
    def alive(self) -> float:
        """Share of the time in which it was not dead."""
        dead_s = sum(min(end, self.seconds) - start for start, end in self.dead)
        return 1 - dead_s / self.seconds


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One row of the table; goodput and uptime in percent."""

    learners: int
    elastic: bool
    chips: int
    goodput: float
    uptime: float


@dataclass(frozen=True, slots=True)
class Fleet:
    """A row, and what came of its rounds if they were played."""

    row: FleetRow
    rounds: Rounds | None = None


def simulate_rigid(failures: Iterator[Failure], parameters: FleetParameters) -> LearnerTime:
    """A learner without elasticity: it stands still until the failed slice is back, and restarts.
    Chips that stand still do not fail."""
    result = LearnerTime(parameters.seconds)
    now, shift = 0.0, 0.0  # what stood still moves later failures back
    for when, recovery, _ in failures:
        at = when + shift
        if at >= parameters.seconds:
            break
        result.good_s += at - now - parameters.in_progress_s(at - now)
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
        self._since = 0.0  # it has been computing, step after step
        self._advance()

    def _advance(self) -> None:
        self._next, self._recovery, self._where = next(self._failures, NEVER)

    @property
    def _share(self) -> float:
        """Of its chips that compute."""
        return max(0.0, 1 - self._away / self._slices)

    def run(self) -> LearnerTime:
        """To the end of the simulated time."""
        now, end = 0.0, self._parameters.seconds
        while now < end:
            returned = self._returns[0] if self._returns else INFINITY
            # slices that were to join during a dead time join right after it
            at = max(now, min(self._next, self._upscale_at, returned, end))
            self._result.good_s += (at - now) * self._share
            now = at
            if at == end:
                break
            if at == returned and at < min(self._next, self._upscale_at):
                self._take_back(now)
            elif self._next <= now and self._where < self._away / self._slices:
                self._advance()  # would have struck a slice that is away
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
            lost_s = self._parameters.in_progress_s(now - self._since)
            self._result.good_s -= lost_s * self._share
        else:  # at the end of a step
            back = now + self._parameters.upscale_s
            self._away -= self._waiting
            self._waiting, self._upscale_at = 0, INFINITY
        while self._next <= now or self._next < back:
            if self._where >= self._away / self._slices:
                self._away += 1
                self._result.failures += 1
                heapq.heappush(self._returns, self._next + self._recovery)
            self._advance()
        self._result.dead.append((now, back))
        self._since = back
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
    """One row: M learners of chips/M chips each, of which none waits.

    Raises:
        ValueError: no learner, or fewer chips than learners.
    """
    times = _simulate_learners(learners, chips, elastic, parameters, seed, trace)
    goodput = sum(time.goodput for time in times) / learners
    return FleetRow(learners, elastic, chips, 100 * goodput, 100 * uptime(times))


def simulate_fleet_in_rounds(
    learners: int,
    chips: int,
    elastic: bool,
    parameters: FleetParameters,
    rules: RoundRules,
    seed: int,
    trace: FailureTrace | None = None,
) -> Fleet:
    """One row whose rounds are played too: what waiting costs, and who contributes.

    Raises:
        ValueError: no learner, fewer chips than learners, a quorum that they cannot reach.
    """
    refuse_endless(
        learners * parameters.seconds / rules.round_s, "rounds", "round_s", rules.round_s
    )
    times = _simulate_learners(learners, chips, elastic, parameters, seed, trace)
    rounds = simulate_rounds(
        [time.dead for time in times], rules, parameters.speed_jitter, parameters.seconds, seed
    )
    goodput = sum(
        time.goodput * stepping / time.alive if time.alive else 0.0
        for time, stepping in zip(times, rounds.stepping, strict=True)
    )
    row = FleetRow(learners, elastic, chips, 100 * goodput / learners, 100 * uptime(times))
    return Fleet(row, rounds)


def refuse_endless(events: float, what: str, name: str, given: float) -> None:
    """Refuse what would not end within hours.

    Raises:
        ValueError: more than `MOST_EVENTS` would have to be simulated.
    """
    if events > MOST_EVENTS:
        raise ValueError(
            f"{name} is {given:g}, which makes {events:.0e} {what}; allowed: at most "
            f"{MOST_EVENTS:.0e}. Simulate fewer days or chips."
        )


def _simulate_learners(
    learners: int,
    chips: int,
    elastic: bool,
    parameters: FleetParameters,
    seed: int,
    trace: FailureTrace | None,
) -> list[LearnerTime]:
    if learners < 1 or chips < learners:
        raise ValueError(
            f"learners is {learners}, chips is {chips}; allowed: at least 1 learner, and as many "
            "chips as learners."
        )
    if trace is None:
        events = chips * parameters.failures_per_chip_s * parameters.seconds
        refuse_endless(events, "failures", "mtbi_years", parameters.mtbi_years)
    else:
        events = len(trace.rows) * parameters.seconds / trace.seconds
        refuse_endless(events, "failures", "days", parameters.days)
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
    return times


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
