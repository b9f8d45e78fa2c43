"""Chaos in a run of the launcher: the disk before it, faults while it lasts, what became of them.

The injector decides and acts; here is only what it needs of the launcher's processes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from dd_lightning.chaos.disk import SmallDisk
from dd_lightning.chaos.injector import Disk, Injector, Processes
from dd_lightning.chaos.plan import FaultPlan
from dd_lightning.chaos.signals import pause, resume
from dd_lightning.launch.processes import Child
from dd_lightning.syncer.run_files import read_started


class Children:
    """The run's processes by role, as the injector asks for them.

    Args:
        find: the running child of "syncer", "proxy" or "learner 0" that has joined, else None.
    """

    def __init__(self, find: Callable[[str], Child | None]) -> None:
        self._find = find
        self._paused: dict[int, subprocess.Popen[bytes]] = {}

    def pid(self, role: str) -> int | None:
        """None while it is not there."""
        child = self._find(role)
        return None if child is None or child.exit_code() is not None else child.pid

    def signal(self, role: str, number: int) -> None:
        """Send a signal; without effect where it has just ended."""
        if (pid := self.pid(role)) is not None:
            os.kill(pid, number)

    def pause(self, role: str, seconds: float) -> None:
        """Stop it; without effect where it has just ended."""
        if (pid := self.pid(role)) is not None:
            self._paused[pid] = pause(pid, seconds)

    def resume(self) -> None:
        """Whatever is paused goes on."""
        for pid, waker in self._paused.items():
            waker.kill()
            waker.wait()
            resume(pid)
        self._paused.clear()

    def proxy(self, command: Mapping[str, Any]) -> bool:
        """A line on its stdin; False while it is not there."""
        child = self._find("proxy")
        return child is not None and child.exit_code() is None and child.tell(json.dumps(command))


class RunDisk(Disk, Protocol):
    """The disk under the syncer's checkpoints, from before the syncer starts until all have ended.

    `SmallDisk`'s `mount` and `unmount` may raise OSError.
    """

    def mount(self) -> None:
        """Before the syncer starts."""

    def unmount(self) -> None:
        """After all have ended."""


class RunChaos:
    """The faults of one run.

    Args:
        say: shows the user a line that stays.
        disk: needed by full_disk only.
        clock: seconds since the run's start; None: it has not begun.
        wall: in which learners note when they fired something.
    """

    def __init__(
        self,
        plan: FaultPlan,
        folder: Path,
        processes: Processes,
        say: Callable[[str], None],
        disk: RunDisk | None,
        clock: Callable[[], float | None],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._plan, self._say, self._disk, self._clock = plan, say, disk, clock
        self._injector = Injector(plan, folder, processes, disk, wall)
        self._last_s = 0.0

    @classmethod
    def of_children(
        cls,
        plan: FaultPlan,
        folder: Path,
        find: Callable[[str], Child | None],
        say: Callable[[str], None],
    ) -> RunChaos:
        """Of real processes; `find` as of `Children`."""
        disk = None if plan.disk_mib is None else SmallDisk(folder / "syncer", plan.disk_mib)

        def clock() -> float | None:
            began = read_started(folder / "syncer")
            return None if began is None else time.time() - began.wall_s

        return cls(plan, folder, Children(find), say, disk, clock)

    def begin(self) -> None:
        """Before the syncer starts: say what is planned, mount the small disk.

        Raises:
            OSError: it could not be mounted.
        """
        for line in self._plan.describe():
            self._say(line)
        if self._disk is not None:
            self._disk.mount()

    def poll(self) -> None:
        """Fire what is due; called by the launcher's loop."""
        if not self._plan.kinds:
            return
        now_s = self._clock()
        if now_s is None:
            return
        self._last_s = now_s
        self._injector.poll(now_s)

    def release(self) -> None:
        """The processes are about to be ended: nothing stays stopped or full."""
        self._injector.close()

    def unmount(self) -> str:
        """After every process has ended: the small disk's files into the run folder.

        Returns:
            What went wrong, in words; "" where nothing did.
        """
        try:
            if self._disk is not None:
                self._disk.unmount()
        except (OSError, shutil.Error) as error:
            return f"the small disk of chaos={self._plan.name} stays mounted: {error}"
        return ""

    def end(self, whole: bool) -> tuple[list[dict[str, Any]], list[str]]:
        """After every process has ended: events for the tape, and what of the plan did not happen.

        Args:
            whole: the run went to its end, so that what did not fire is the plan's failure.
        """
        name, guard = self._plan.name, self._plan.guard
        why = (
            "faults fire after the syncer's first checkpoint (chaos.not_before="
            f"{guard.not_before}) "
            f"and with chaos.min_left_s={guard.min_left_s:g} s of steps left"
        )
        problems = [
            f"chaos {name}: a planned fault did not fire: {text}; {why}"
            for text in (self._injector.unfired() if whole else ())
        ]
        events = [{"event": "fault", **row} for row in self._injector.faults(self._last_s)]
        if whole and self._injector.drew_none:
            text = f"chaos {name}: the Poisson process drew no fault"
            self._say(f"warning: {text}")
            events.append({"event": "warning", "t_s": self._last_s, "text": text})
        return events, problems
