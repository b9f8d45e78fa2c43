"""When the faults of a plan befall a data-parallel run, in virtual time.

The plan and its guard are those of every run. A Poisson process' clock stands still while the job
does: it fires as often in an hour of steps as it does to learners that never wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from dd_lightning.chaos.faults import SYNCER, Fault
from dd_lightning.chaos.injector import AWAY, Fired
from dd_lightning.chaos.plan import FaultPlan

NO_SYNCER = "there is no syncer"
TOO_LATE = "its moment did not come"


class FaultTimes:
    """Hands out the plan's faults in the order of time.

    Args:
        max_steps: of the job.
    """

    def __init__(self, plan: FaultPlan, max_steps: int) -> None:
        self._plan, self._max_steps = plan, max_steps
        self._due: list[tuple[float, int, Fault]] = []
        self._waiting: list[Fault] = []  # planned ones, for a member that is away
        self._numbers = count()
        self._at_steps = sorted(
            (fault for fault in plan.faults if fault.at_step is not None),
            key=lambda fault: fault.at_step or 0,
        )
        self._fired: dict[int, Fired] = {}
        self._is_open = False
        self._drawn: Iterator[tuple[float, Fault]] | None = None
        self._next: tuple[float, Fault] | None = None  # of the Poisson process
        self._begun_s, self._until_s = 0.0, float("inf")
        if plan.guard.not_before == "start":
            self.open(0.0, 0, 0.0)

    # ------------------------------------------------------------------ what the job tells

    def open(self, now: float, step: int, step_s: float) -> None:
        """From now on faults may fire: the first checkpoint is written.

        Args:
            step_s: mean seconds of the steps so far.
        """
        if self._is_open:
            return
        self._is_open = True
        for fault in self._plan.faults:
            if fault.at_s is not None:
                self._push(max(fault.at_s, now), fault)
        self.stepped(now, step, step_s)

    def stepped(self, now: float, step: int, step_s: float) -> None:
        """The job has done so many steps."""
        while self._is_open and self._at_steps and step >= (self._at_steps[0].at_step or 0):
            self._push(now, self._at_steps.pop(0))
        poisson = self._plan.poisson
        if poisson is not None and self._is_open and self._drawn is None and step:
            window_s = self._left_s(step, step_s)
            if window_s <= 0:
                return  # no time is left for them
            self._drawn = poisson.draw(poisson.scaled(window_s))
            self._until_s = now + window_s if poisson.mean_s is None else float("inf")
            self._begun_s = now
            self._draw()

    def stood_still(self, seconds: float) -> None:
        """The job did not step for so long: neither does the Poisson process."""
        self._begun_s += seconds
        self._until_s += seconds
        if self._next is not None:
            self._next = (self._next[0] + seconds, self._next[1])

    # ------------------------------------------------------------------ what befalls it

    @property
    def next_s(self) -> float:
        """When the next fault fires; infinity where none is known."""
        first = self._due[0][0] if self._due else float("inf")
        return min(first, self._next[0] if self._next is not None else float("inf"))

    def pop(self, step: int, step_s: float) -> tuple[float, Fault] | None:
        """The next fault, taken as fired; None where too little of the run is left for it."""
        drawn = self._next is not None and (not self._due or self._next[0] <= self._due[0][0])
        if drawn:
            assert self._next is not None  # just asked
            at_s, fault = self._next
            self._draw()
        else:
            at_s, _, fault = heapq.heappop(self._due)
        late = self._left_s(step, step_s) < 0 or (drawn and at_s > self._until_s)
        if late:
            self._fired[fault.number] = Fired(fault, None, why="too little of the run was left")
            self._next = None if drawn else self._next
            return None
        if fault.target == SYNCER:
            self._fired[fault.number] = Fired(fault, None, why=NO_SYNCER)
            return None
        lasts_s = fault.lasts_s
        self._fired[fault.number] = Fired(fault, at_s, None if lasts_s is None else at_s + lasts_s)
        return at_s, fault

    def missed(self, fault: Fault) -> None:
        """Its target was away: a drawn fault is over with that, a planned one waits for it."""
        if fault.poisson is not None:
            self._fired[fault.number] = Fired(fault, None, why=AWAY)
        else:
            del self._fired[fault.number]
            self._waiting.append(fault)

    def back(self, members: Sequence[int], now: float) -> None:
        """These take part again: what has waited for them befalls them now."""
        due = [fault for fault in self._waiting if int(fault.target) in members]
        self._waiting = [fault for fault in self._waiting if fault not in due]
        for fault in due:
            self._push(now, fault)

    # ------------------------------------------------------------------ the end

    def rows(self, now: float) -> list[dict[str, Any]]:
        """`fault` rows for the tape, earliest first."""
        found = dict(self._fired)
        for fault in self._plan.faults:
            found.setdefault(fault.number, Fired(fault, None, why=TOO_LATE))
        rows = [one.row(self._plan.name, now) for one in found.values()]
        return sorted(rows, key=lambda row: (row["t_s"], row["number"]))

    def unfired(self) -> list[str]:
        """Planned faults of members that did not fire, in words."""
        return [
            fault.describe()
            for fault in self._plan.faults
            if fault.target != SYNCER
            and (fault.number not in self._fired or self._fired[fault.number].fired_s is None)
        ]

    def _left_s(self, step: int, step_s: float) -> float:
        """Seconds in which faults may fire yet."""
        return (self._max_steps - step) * step_s - self._plan.guard.min_left_s

    def _push(self, at_s: float, fault: Fault) -> None:
        heapq.heappush(self._due, (at_s, next(self._numbers), fault))

    def _draw(self) -> None:
        assert self._drawn is not None  # the process has begun
        at_s, fault = next(self._drawn)
        self._next = (self._begun_s + at_s, fault)
