"""Stopping a process for a while, so that it goes on whatever becomes of who stopped it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def pause(pid: int, seconds: float) -> subprocess.Popen[bytes]:
    """SIGSTOP to `pid`, which a small process undoes after `seconds`; returns that one.

    It is started first, in a session of its own: a process that stops itself, or whose launcher is
    killed meanwhile, must not stay stopped for ever, deaf to SIGTERM.
    """
    command = ["/bin/sh", "-c", f"sleep {seconds:.3f}; kill -CONT {pid}"]
    waker = subprocess.Popen(
        command, start_new_session=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.kill(pid, signal.SIGSTOP)
    return waker


def resume(pid: int) -> None:
    """SIGCONT, without effect where the process has gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
