"""Processes that an earlier, killed launcher left in a run's folder: awaited before it is emptied.

The kernel tells them to end when their launcher dies (`processes`); they then still write for a
moment.
"""

from __future__ import annotations

import time
from pathlib import Path

LEFTOVERS_S = 20.0  # above timeouts.shutdown, within which a process that was told to ends
POLL_S = 0.1
ROLES = frozenset(
    {
        "syncer",
        "dd_lightning.launch.learner",
        "dd_lightning.launch.evaluator",
        "dd_lightning.network.proxy",
    }
)


def await_leftovers(folder: Path, timeout_s: float = LEFTOVERS_S) -> None:
    """Return once no process of the run in `folder` is left.

    Raises:
        ValueError: some are after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while pids := leftovers(folder):
        if time.monotonic() > deadline:
            raise ValueError(
                f"{folder} holds a run whose processes {', '.join(map(str, pids))} are still "
                "running; allowed: a folder that nobody writes to. End them first."
            )
        time.sleep(POLL_S)


def leftovers(folder: Path) -> list[int]:
    """Pids of syncer, proxy, learners and evaluator of the run in `folder`.

    Read from /proc; none are known where there is no such thing.
    """
    inside = (str(folder), f"{folder}/")
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has ended meanwhile, or is another user's
            continue
        if ROLES & set(words) and any(w == inside[0] or w.startswith(inside[1]) for w in words):
            found.append(int(path.parent.name))
    return found
