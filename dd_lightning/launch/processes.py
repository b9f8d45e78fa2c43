"""Child processes that leave nothing behind: own session, log file, scrubbed environment.

A child is in a session of its own, so Ctrl-C reaches only the launcher, which then ends the
children in order. Should the launcher itself be killed, the kernel sends each child SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
POLL_S = 0.02
LOG_TAIL_LINES = 15

# What torchrun, Slurm wrappers or an outer Trainer leave behind: a learner that sees them believes
# itself a rank of their job and hangs in its rendezvous. DD_* of an outer run would misdirect it.
SCRUBBED = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "NODE_RANK",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "HYDRA_FULL_ERROR",
    "DD_SYNCER",
    "DD_LEARNER",
    "DD_VIA",
    "DD_KEY",
    "DD_LAUNCHED",
    "DD_SWEEP_PID",
)
THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


def scrubbed_environment(threads: int, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The launcher's environment without what belongs to another job, with thread limits."""
    environment = {key: value for key, value in os.environ.items() if key not in SCRUBBED}
    environment.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    environment["PYTHONUNBUFFERED"] = "1"  # a log's last lines must be there after a crash
    # a store that is away is retried, and said in our words; torch's are a stack trace each
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.update(extra or {})
    return environment


def _begin(parent: int, nice: int) -> None:
    """In the child, before exec: its priority, and SIGTERM when the launcher is gone (Linux;
    elsewhere no help)."""
    os.nice(nice)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died between fork and prctl
        os._exit(1)


class Child:
    """One started process with its log file; `name` is what messages call it."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        keep_stdin: bool = False,
        nice: int = 0,
    ) -> None:
        self.name = name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        parent = os.getpid()
        with open(log, "ab") as out:
            self._log_start = out.seek(0, os.SEEK_END)  # before it: what an earlier life said
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE if keep_stdin else subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=lambda: _begin(parent, nice),
            )
        self.pid = self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, or None where it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def tell(self, line: str) -> bool:
        """Write a line to a child that was started with `keep_stdin`; False: it has ended."""
        assert self._process.stdin is not None  # it keeps its stdin
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return False
        return True

    def close_stdin(self) -> None:
        """Tell a child that was started with `keep_stdin` that nothing more will come."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def terminate(self) -> None:
        """SIGTERM, by pid; without effect on a process that has ended."""
        self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the child and to all that it started in its session; then reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self.close_stdin()

    def renice(self) -> bool:
        """Give it and all that it started the launcher's own priority; False: not allowed to."""
        own = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PGRP, self.pid, own)  # every thread; its session has one group
        except PermissionError:
            return False
        except ProcessLookupError:
            pass  # it has ended: nothing is left to be slow
        return True

    def said(self, key: str) -> dict[str, Any] | None:
        """The first line that this process logged as a JSON object with `key` in it, if any yet."""
        with open(self.log, "rb") as file:
            file.seek(self._log_start)
            for line in file:
                if line.startswith(b'{"') and line.endswith(b"\n"):
                    found: dict[str, Any] = json.loads(line)
                    if key in found:
                        return found
        return None

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The log's last lines."""
        with open(self.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 16384))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def description(self) -> str:
        """How it ended, for a message."""
        code = self.exit_code()
        if code is None:
            return f"{self.name} is still running"
        if code < 0:
            return f"{self.name} was ended by {signal.Signals(-code).name}"
        return f"{self.name} ended with exit code {code}"


def end_all(stages: Iterable[Sequence[Child]], stage_s: float, timeout_s: float) -> list[str]:
    """End children stage by stage; return the names of those that had to be killed.

    Each stage gets SIGTERM; the next one follows when it has ended or after `stage_s`. The last
    stage, which writes what must not be lost, has until `timeout_s` after the call, and so has
    whoever of an earlier one still writes; who is left then is killed.
    """
    deadline = time.monotonic() + timeout_s
    stages = [list(stage) for stage in stages]
    children = [child for stage in stages for child in stage]
    try:
        for stage in stages:
            for child in stage:
                child.terminate()
            _wait_all(stage, min(deadline, time.monotonic() + stage_s))
        _wait_all(children, deadline)
    finally:  # also where a second Ctrl-C cuts the waiting short
        killed = [child.name for child in children if child.exit_code() is None]
        for child in children:
            child.kill()  # also of ended ones: their own children are in the same session
    return killed


def _wait_all(children: Sequence[Child], deadline: float) -> None:
    while time.monotonic() < deadline:
        if all(child.exit_code() is not None for child in children):
            return
        time.sleep(POLL_S)
