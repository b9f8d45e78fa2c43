"""When an inner step begins and ends: its duration, and the seconds spent stepping."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepClock:
    """A step lasts from the end of the one before (the first: from its own start) to its end, less
    pauses (validation) and waits. Data loading and the boundary count as stepping."""

    seconds_stepping: float = 0.0
    _mark: float | None = None  # end of the last step, moved on by what is left out
    _left_out_since: float | None = None

    def begin(self, now: float) -> None:
        """A batch starts; only the first one matters."""
        if self._mark is None:
            self._mark = now

    def leave_out(self, now: float) -> None:
        """From here on time is not stepping (until `resume`)."""
        if self._left_out_since is None:
            self._left_out_since = now

    def resume(self, now: float) -> None:
        """Time is stepping again."""
        if self._left_out_since is not None and self._mark is not None:
            self._mark += now - self._left_out_since
        self._left_out_since = None

    def end(self, now: float) -> float:
        """An inner step has ended; its seconds."""
        self.resume(now)
        assert self._mark is not None  # a batch starts before its step ends
        seconds, self._mark = now - self._mark, now
        self.seconds_stepping += seconds
        return seconds
