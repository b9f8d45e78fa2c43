"""The clock of a simulated run: a heap of events, played in order of time.

What happens at one instant happens in the order of the `*_FIRST` constants, then in the order in
which it was asked for: messages arrive before the syncer looks at them, and that before any learner
comes to a boundary. So a run is a pure function of its settings and its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

MESSAGES_FIRST, SYNCER_NEXT, BOUNDARIES_LAST = 0, 1, 2

Action = Callable[[], None]


class Stuck(RuntimeError):
    """Nothing is left to happen, but the run is not over."""


class VirtualTime:
    """Seconds since the run's start; moves only in `run` and `play`."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Action]] = []
        self._numbers = count()

    def clock(self) -> float:
        """Now, as a function that stands in for `time.monotonic`."""
        return self.now

    def at(self, when: float, action: Action, order: int = MESSAGES_FIRST) -> None:
        """Let `action` happen at `when` (at once if that is past)."""
        heapq.heappush(self._events, (max(when, self.now), order, next(self._numbers), action))

    def play(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Play what happens up to `until`, which then is now; less where `is_over()` before."""
        while not is_over():
            if not self._events or self._events[0][0] > until:
                self.now = max(self.now, until)
                return
            self.now, _, _, action = heapq.heappop(self._events)
            action()

    def run(self, is_over: Callable[[], bool], limit_s: float = float("inf")) -> None:
        """Play events until `is_over()`.

        Raises:
            Stuck: no event is left, or virtual time has passed `limit_s`.
        """
        while not is_over():
            if not self._events:
                raise Stuck(f"nothing is left to happen at {self.now:g} s of virtual time")
            when, _, _, action = heapq.heappop(self._events)
            if when > limit_s:
                raise Stuck(f"the run is not over after {limit_s:g} s of virtual time")
            self.now = when
            action()
