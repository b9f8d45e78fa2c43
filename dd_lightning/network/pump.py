"""Drives lanes and arrivals with one timer for all of them, on a clock that is given.

The proxy gives it the loop of asyncio, the simulator virtual time (`simulate/flows.py`).
"""

import heapq
from collections.abc import Callable
from typing import Any, Protocol

from dd_lightning.network.lane import Flow, Lane
from dd_lightning.network.link import Direction, LinkModel

TICK_S = 0.001  # smallest step of the timer: what epoll can time, and few wake-ups on a busy core


class Timer(Protocol):
    """As asyncio's `TimerHandle`."""

    def when(self) -> float: ...
    def cancel(self) -> None: ...


class Clock(Protocol):
    """What is needed of an asyncio loop."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[[], Any]) -> Timer: ...


class Pump:
    """Gives flows their turns on the lanes and hands chunks over when they arrive.

    Args:
        tick_s: smallest step of the timer; 0 where time is virtual.
    """

    def __init__(self, model: LinkModel, loop: Clock, tick_s: float = TICK_S) -> None:
        self._model = model
        self._loop = loop
        self._tick_s = tick_s
        self._lanes: dict[tuple[str, Direction], Lane] = {}
        self._arrivals: list[tuple[float, int, Flow]] = []
        self._timer: Timer | None = None

    def now(self) -> float:
        """The loop's clock, s."""
        return self._loop.time()

    def lane(self, region: str, direction: Direction) -> Lane:
        """The lane that the flows of this region share."""
        key = (region, direction)
        if key not in self._lanes:
            self._lanes[key] = Lane(self._model.serializer(region, direction))
        return self._lanes[key]

    def push(self, lane: Lane, flow: Flow, data: bytes) -> None:
        """Send bytes (empty: the close) on their way."""
        now = self._loop.time()
        flow.push(now, data)
        lane.enlist(flow)
        self._fill(lane, now)
        self._arm()

    def expect(self, flow: Flow) -> None:
        """Put the flow's next arrival on the clock, after its receiver had taken no more."""
        self._time(flow)
        self._arm()

    def close(self) -> None:
        """Stop the timer; what is on its way is lost."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._arrivals.clear()
        self._lanes.clear()

    def _fill(self, lane: Lane, now: float) -> None:
        for flow in lane.pump(now):
            self._time(flow)
            if not flow.waiting:
                flow.emptied()

    def _time(self, flow: Flow) -> None:
        if not flow.timed and flow.next_arrival is not None:
            flow.timed = True
            heapq.heappush(self._arrivals, (flow.next_arrival, flow.number, flow))

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._arrivals and self._arrivals[0][0] <= now:
            flow = heapq.heappop(self._arrivals)[2]
            flow.timed = False
            if flow.hand_over():
                self._time(flow)
        for lane in self._lanes.values():
            self._fill(lane, now)
        self._arm()

    def _arm(self) -> None:
        """One timer, for the earliest of: an arrival, a lane that can be filled again."""
        times = [when for lane in self._lanes.values() if (when := lane.next_pump()) is not None]
        if self._arrivals:
            times.append(self._arrivals[0][0])
        if not times:
            return
        when = max(min(times), self._loop.time() + self._tick_s / 2)
        if self._timer is not None:
            if self._timer.when() <= when + self._tick_s / 4:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(when, self._tick)
