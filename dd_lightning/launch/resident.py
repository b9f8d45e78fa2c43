"""Resident memory of a launched run's syncer, read from /proc while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02
MARK = "syncer"  # a word of its command line


@dataclass(slots=True)
class Resident:
    """Watches the syncer that process `launcher` starts for the run in `folder`.

    `empty`: bytes when it listened, before any learner had sent a layout. `peak`: the most so far.
    """

    folder: Path
    launcher: int
    empty: int = 0
    peak: int = 0

    def watch(self, over: Callable[[], bool], limit_s: float) -> None:
        """Until `over()`.

        Raises:
            TimeoutError: not over within `limit_s`.
        """
        deadline = time.monotonic() + limit_s
        pid: int | None = None
        while not over():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run in {self.folder} is not over after {limit_s:g} s")
            pid = self._syncer() if pid is None else pid
            if pid is not None:
                self._read(pid)
            time.sleep(POLL_S)

    def _syncer(self) -> int | None:
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:  # it has ended meanwhile: not the one looked for
                continue
            if parent == self.launcher and MARK in command.split("\0"):
                return int(entry.name)
        return None

    def _read(self, pid: int) -> None:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended: the peak stays
            return
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        if "VmHWM" not in fields:
            return  # a zombie has no memory
        self.peak = max(self.peak, 1024 * int(fields["VmHWM"].split()[0]))
        if not self.empty and (self.folder / "syncer" / "ports.json").exists():
            self.empty = 1024 * int(fields["VmRSS"].split()[0])
