"""Coalesced progress of a learner, which is its heartbeat too, and the round trips it measures."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from dd_lightning.protocol.held import Held
from dd_lightning.protocol.messages import Progress

SPACING_S = 0.004  # reports of faster steps are coalesced
PING_EVERY_S = 0.5
MOST_STEPS_KEPT = 1000  # durations, while the syncer is away
LOSSES = 20
ROUND_TRIPS = 64


@dataclass(slots=True)
class ProgressReport:
    """What has not been reported yet. All times in seconds of the caller's clock."""

    state: str = "training"
    seconds_stepping: float = 0.0
    fresh: bool = False  # something happened since the last report
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS_KEPT))
    boundary_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_STEPS_KEPT))
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES))
    round_trips: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS))
    _sent_s: float = float("-inf")
    pings: int = 0  # reports that ask for an answer, numbered from 1
    _pinged_s: float = float("-inf")
    _under_way: dict[int, float] = field(default_factory=dict)  # ping: when it was sent

    def add(
        self,
        state: str,
        step_seconds: float | None,
        seconds_stepping: float,
        loss: float | None,
        boundary_s: float | None = None,
    ) -> bool:
        """Take in a report of the training side; True when it is to be sent at once."""
        urgent = state != self.state
        self.state, self.seconds_stepping, self.fresh = state, seconds_stepping, True
        if step_seconds is not None:
            self.step_seconds.append(step_seconds)
            if boundary_s is not None:
                self.boundary_seconds.append(boundary_s)
        if loss is not None:
            self.losses.append(loss)
        return urgent

    def is_due(self, now: float) -> bool:
        """Whether the last report is long enough ago for the next."""
        return now >= self._sent_s + SPACING_S

    def due_s(self, heartbeat_s: float) -> float:
        """When the next report is to go out."""
        return self._sent_s + (SPACING_S if self.fresh else heartbeat_s)

    def message(self, held: Held, last_error: str, now: float) -> Progress:
        """Everything since the last report, with generation 0."""
        ping = 0
        if now >= self._pinged_s + PING_EVERY_S:
            self.pings += 1
            ping, self._pinged_s = self.pings, now
            self._under_way[ping] = now
            self._under_way.pop(ping - ROUND_TRIPS, None)  # lost
        report = Progress(
            generation=0,
            step=held.step,
            odometer=held.odometer,
            data_position=held.data_position,
            state=self.state,
            step_seconds=tuple(self.step_seconds),
            boundary_seconds=tuple(self.boundary_seconds),
            seconds_stepping=self.seconds_stepping,
            losses=tuple(self.losses),
            ping=ping,
            rtt_ms=1000.0 * median(self.round_trips) if self.round_trips else None,
            last_error=last_error,
        )
        self.step_seconds.clear()
        self.boundary_seconds.clear()
        self.fresh, self._sent_s = False, now
        return report

    def pong(self, ping: int, now: float) -> None:
        """The answer to a ping."""
        sent_s = self._under_way.pop(ping, None)
        if sent_s is not None:
            self.round_trips.append(now - sent_s)
