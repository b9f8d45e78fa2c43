"""Carries a fault plan out from the launcher: by pid, through the proxy, on the disk, by order.

Polled by the launcher's loop; it never waits. Each fault that fires is written to the run folder
before it happens, so that a launcher that goes on with the run does not fire it again.
"""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dd_lightning.chaos.faults import KINDS, Fault
from dd_lightning.chaos.guard import StepsLeft
from dd_lightning.chaos.plan import FaultPlan
from dd_lightning.chaos.records import DONE, ORDERS, NewRows, append

log = logging.getLogger(__name__)

REPORT_S = 3.0  # steps are known so late: the status is written every second
FIRED = "faults.jsonl"  # in the run folder: what has fired, as on the tape
AWAY = "its target was away"


class Disk(Protocol):
    """What the injector needs of the disk under the syncer's checkpoints."""

    def fill(self) -> None:
        """Take all space that is left."""

    def free(self) -> None:
        """Give it back."""


class Processes(Protocol):
    """What the injector needs of the launcher."""

    def pid(self, role: str) -> int | None:
        """Of "learner 0" or "syncer"; None while it is not there."""

    def signal(self, role: str, number: int) -> None:
        """Send a signal."""

    def pause(self, role: str, seconds: float) -> None:
        """Stop it where it stands; it goes on by itself after `seconds`."""

    def resume(self) -> None:
        """Let go on whatever is paused still."""

    def proxy(self, command: Mapping[str, Any]) -> bool:
        """Tell the proxy; False while it is not there."""


@dataclass(frozen=True, slots=True)
class Fired:
    """What became of a fault: when it fired and until when it lasts, s; `why` it did not."""

    fault: Fault
    fired_s: float | None
    until_s: float | None = None
    why: str = ""

    def row(self, kind: str, now_s: float) -> dict[str, Any]:
        """For the tape."""
        fault = self.fault
        return {
            "t_s": now_s if self.fired_s is None else self.fired_s,
            "kind": kind,
            "action": fault.kind,
            "target": fault.target,
            "planned": fault.planned,
            "fired": self.fired_s,
            "until": self.until_s,
            "number": fault.number,
            "options": dict(fault.options),
            **({"why": self.why} if self.why else {}),
        }


class Injector:
    """Carries out one plan.

    Args:
        folder: the run folder.
        disk: under the syncer's checkpoints; needed by full_disk only.
        wall: seconds, in which learners note when they fired something.
    """

    def __init__(
        self,
        plan: FaultPlan,
        folder: Path,
        processes: Processes,
        disk: Disk | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._folder, self._processes = plan, folder, processes
        self._disk, self._wall = disk, wall
        self._left = StepsLeft(plan.run.max_steps, plan.run.step_floor_s)
        self._status_read = b""  # as it was
        self._open = False
        self._faults = {fault.number: fault for fault in plan.faults}
        self._rows = {
            learner: NewRows(folder / "learners" / learner / DONE) for learner in plan.run.learners
        }
        self._fired: dict[int, Fired] = {}
        self._asked: list[Fault] = []  # by a learner, at its step
        self._ordered: set[int] = set()  # of a learner, which has not said yet that it did
        self._before = {row["number"] for row in NewRows(folder / FIRED).read()}
        self._drawn: Iterator[tuple[float, Fault]] | None = None
        self._next: tuple[float, Fault] | None = None  # of the Poisson process, on its clock
        self._ticks = _Ticks()
        self._until_s = float("inf")
        self._full_until_s: float | None = None

    # ------------------------------------------------------------------ the launcher's calls

    def poll(self, now_s: float) -> None:
        """Fire what is due at this time of the run's clock, undo what is over."""
        self._free_disk(now_s)
        self._read_rows(now_s)
        self._read_status()
        self._open = self._open or self._plan.guard.is_open(self._folder)
        self._asked = [fault for fault in self._asked if not self._fire(fault, now_s)]
        if not self._open:
            return
        for fault in self._plan.faults:
            if fault.at_s is not None and fault.at_s <= now_s and self._is_due(fault):
                self._fire(fault, now_s)
        self._poll_poisson(now_s)

    def close(self) -> None:
        """The run is over: nothing stays stopped or full. Idempotent."""
        self._processes.resume()
        self._free_disk(float("inf"))

    def unfired(self) -> list[str]:
        """Planned faults that did not fire, in words; a Poisson process plans none."""
        return [
            fault.describe()
            for fault in self._plan.faults
            if fault.number not in self._fired and fault.number not in self._before
        ]

    @property
    def drew_none(self) -> bool:
        """Whether a Poisson process was planned and no fault of it has fired."""
        fired = [one for one in self._fired.values() if one.fired_s is not None]
        return self._plan.poisson is not None and not fired and not self._before

    def faults(self, now_s: float = 0.0) -> list[dict[str, Any]]:
        """Rows for the tape, earliest first; `now_s` stands where a fault did not fire."""
        found = dict(self._fired)
        for fault in self._plan.faults:
            if fault.number not in self._before:
                found.setdefault(fault.number, Fired(fault, None, why="its moment did not come"))
        rows = [one.row(self._plan.name, now_s) for one in found.values()]
        return sorted(rows, key=lambda row: (row["t_s"], row["number"]))

    # ------------------------------------------------------------------ what is known

    def _read_rows(self, now_s: float) -> None:
        """What learners have done, and what they ask for."""
        for learner, rows in self._rows.items():
            for row in rows.read():
                number = row["number"]
                fault = self._faults.get(number)
                if fault is None or number in self._fired or number in self._before:
                    continue
                if row["asks"]:
                    self._asked.append(fault)
                    continue
                log.info("learner %s did %s at step %d", learner, fault.kind, row["step"])
                self._note(fault, now_s - max(0.0, self._wall() - row["wall_s"]))

    def _read_status(self) -> None:
        file = self._folder / "syncer" / "status.json"
        try:
            found = file.read_bytes()
        except FileNotFoundError:
            return
        if found == self._status_read:  # not its time, which is too coarse for virtual time
            return
        self._status_read = found
        status = json.loads(found)
        steps = {name: row["step"] for name, row in status["learners"].items()}
        self._left.saw(status["t_s"], steps)

    def _is_due(self, fault: Fault) -> bool:
        known = (*self._fired, *self._before, *self._ordered)
        return fault.number not in known and self._time_is_left(fault)

    def _time_is_left(self, fault: Fault) -> bool:
        target = fault.target if fault.target in self._plan.run.learners else None
        return self._left.seconds_left(target) >= self._plan.guard.min_left_s

    # ------------------------------------------------------------------ firing

    def _fire(self, fault: Fault, now_s: float) -> bool:
        """Do it; False where that is not possible now."""
        kind = KINDS[fault.kind]
        if kind.network:
            if not self._processes.proxy(proxy_command(fault)):
                return False
            self._note(fault, now_s)
        elif fault.kind == "full_disk":
            assert self._disk is not None  # the launcher mounts one for such a plan
            self._note(fault, now_s)
            self._full_until_s = now_s + fault.options["seconds"]
            self._disk.fill()
        elif kind.inside and not kind.signal:
            if self._processes.pid(fault.role) is None:
                return False
            self._ordered.add(fault.number)
            order = {"number": fault.number, "kind": fault.kind, "options": dict(fault.options)}
            append(self._folder / "learners" / fault.target / ORDERS, order)
        else:
            return self._signal(fault, now_s)
        return True

    def _signal(self, fault: Fault, now_s: float) -> bool:
        if self._processes.pid(fault.role) is None:
            return False
        self._note(fault, now_s)
        if fault.kind == "pause":
            self._processes.pause(fault.role, fault.options["seconds"])
        else:
            self._processes.signal(fault.role, signal.SIGKILL)
        return True

    def _note(self, fault: Fault, fired_s: float) -> None:
        lasts_s = fault.lasts_s
        until_s = None if lasts_s is None else fired_s + lasts_s
        fired = self._fired[fault.number] = Fired(fault, fired_s, until_s)
        append(self._folder / FIRED, fired.row(self._plan.name, fired_s))
        log.warning("chaos: %s", fault.describe())

    def _free_disk(self, now_s: float) -> None:
        if self._full_until_s is not None and now_s >= self._full_until_s:
            self._full_until_s = None
            assert self._disk is not None  # it was filled
            self._disk.free()

    # ------------------------------------------------------------------ the Poisson process

    def _poll_poisson(self, now_s: float) -> None:
        if self._plan.poisson is None:
            return
        if self._drawn is None:
            self._begin_poisson(now_s)
        self._ticks.advance(now_s, self._left.made)
        while self._next is not None and self._next[0] <= self._ticks.now_s:
            at_s, fault = self._next
            if at_s > self._until_s or not self._time_is_left(fault):
                self._next = None  # nor for any later one
                return
            self._faults[fault.number] = fault
            if fault.number not in self._before and not self._fire(fault, now_s):
                self._fired[fault.number] = Fired(fault, None, why=AWAY)
            self._advance()

    def _begin_poisson(self, now_s: float) -> None:
        """The guard has opened: the process begins now."""
        poisson, run = self._plan.poisson, self._plan.run
        assert poisson is not None
        window_s, step_s = self._plan.window_s, run.step_floor_s
        if window_s is None:
            step_s = max(map(self._left.step_s, run.learners))
            window_s = self._left.seconds_left() - self._plan.guard.min_left_s
        if window_s <= 0 or step_s <= 0:  # no step measured yet, or no time left
            return
        if poisson.mean_s is None:  # learners that come back do steps again: no new window for that
            self._until_s = window_s
        self._ticks = _Ticks(step_s, self._left.made, now_s)
        self._drawn = poisson.draw(poisson.scaled(window_s))
        self._advance()

    def _advance(self) -> None:
        assert self._drawn is not None
        self._next = next(self._drawn)


@dataclass(slots=True)
class _Ticks:
    """The clock of a Poisson process: time, but never ahead of the learners' steps.

    It stands still while nobody steps: else a mean below what a restart takes would kill the syncer
    again and again before anyone could make a step.
    """

    step_s: float = 0.0
    made: int = 0  # steps when the process began
    seen_s: float = 0.0  # on the run clock
    now_s: float = 0.0

    def advance(self, run_s: float, made: int) -> None:
        """Go on to this time of the run's clock, with so many steps made by now."""
        most_s = (made - self.made) * self.step_s + REPORT_S
        passed_s, self.seen_s = run_s - self.seen_s, run_s
        self.now_s = max(self.now_s, min(self.now_s + passed_s, most_s))


def proxy_command(fault: Fault) -> dict[str, Any]:
    """What the proxy is told, as `network/control.py` takes it."""
    options = dict(fault.options)
    do = {"partition": "cut", "flap": "cut", "bandwidth": "throttle", "corrupt": "corrupt"}
    return {"do": do[fault.kind], "learner": fault.target, **options}
