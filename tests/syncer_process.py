"""`dd-lightning syncer` as a process, for tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

RUN_S = 90.0
END_S = 60.0  # bound on the wait for a process that ends, on a busy machine
SETTINGS = (
    "learners=2",
    "max_steps=40",
    "algorithm=short_run",
    "algorithm.fragments=2",
    "algorithm.sync_every=6",
    "algorithm.quorum=2",
    "checkpoint_every_s=0.2",
)


class Syncer:
    """The process, with its address once it listens."""

    def __init__(self, run_dir: Path, *arguments: str, before: tuple[str, ...] = ()) -> None:
        self._run_dir = run_dir
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("DD_LAUNCHED", None)
        command = [
            *before,
            sys.executable,
            "-m",
            "dd_lightning.syncer.command",
            "--run-dir",
            str(run_dir),
        ]
        with open(run_dir.parent / "syncer.err", "ab") as log:
            self.process = subprocess.Popen(
                [*command, *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
            )
        first = self.process.stdout.readline()
        assert first, (run_dir.parent / "syncer.err").read_text()
        self.address = json.loads(first)["listening"]

    def started_s(self) -> float:
        """Wall time at which the run's clock (`t_s` of its tape) began."""
        return json.loads((self._run_dir / "syncer" / "started").read_text())["wall_s"]

    def end(self, timeout_s: float) -> int:
        """Wait; the exit code. Nothing more may have been printed."""
        rest, _ = self.process.communicate(timeout=timeout_s)
        assert rest == ""
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL, unless it has ended."""
        self.process.kill()
        self.process.wait(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RUN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
