"""Named lines at which a crash leaves a different state behind; for tests of restarts.

`DD_CRASH="point[:nth][,point...]"` arms: the nth arrival (default 1) appends a line to the file
`DD_CRASH_TAPE`, forces it to the disk, and the process kills itself. Unarmed, `reach` looks at one
name and returns.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Mapping

SYNCER_POINTS: dict[str, str] = {
    "lock.taken": "the lock is held, the epoch is still the one before",
    "lock.epoch_partial": "the new epoch is in a temporary file",
    "lock.epoch_written": "the epoch has grown, nothing else of this start exists",
    "start.begun": "the run's id and beginning are written, no port is bound",
    "start.channel_bound": "the channel listens, no store tells where",
    "start.store_serves": "learners can come, the ports are in no file",
    "start.ports_written": "the ports are in their file, the tape is not open",
    "start.tape_opened": "the tape is there, the core is not",
    "tape.half_row": "half of a row is on the tape",
    "join.admitted": "the core has admitted a learner, which has not heard",
    "initial.received": "a fragment of version 0 has come, the core has not heard",
    "merge.begun": "a merge was taken off the queue, Θ is as before",
    "merge.stepped": "Θ has moved, its new version exists nowhere else",
    "merge.done": "the merge is done, the core has not heard",
    "merge.booked": "the merge is booked; it is not on the tape, no learner has it",
    "merge.told": "the merge is on the tape and on its way to learners",
    "checkpoint.asked": "a checkpoint was handed out, nothing of it is copied",
    "checkpoint.copied": "the state is copied, no file exists",
    "checkpoint.half_written": "the first bytes are in the temporary file",
    "checkpoint.written": "the temporary file is whole, not forced to the disk",
    "checkpoint.synced": "the temporary file is on the disk under its temporary name",
    "checkpoint.renamed": "the checkpoint is there; the core has not heard, old ones are too",
    "checkpoint.removed_old": "one of the old checkpoints is gone",
    "checkpoint.told": "the checkpoint is on the tape, learners were released on it",
    "end.before_last_checkpoint": "nobody trains; the last checkpoint was not handed out",
    "end.done": "the core is done; every learner was let go",
    "end.before_run_end": "the run is over, its end is not on the tape",
    "end.run_end_written": "the tape is whole, the process has its connections",
    "end.summary": "everything is closed, the summary is not written",
}
"""Name to the state in which the syncer dies there."""

LEARNER_POINTS: dict[str, str] = {
    "learner.joining": "nothing was said to the syncer",
    "learner.admitted": "it has a generation and holds nothing of Θ",
    "learner.half_loaded": "some fragments are loaded, others are not",
    "learner.loaded": "Θ is loaded, no step was made",
    "learner.stepped": "a step was made that nobody has heard of",
    "learner.snapshot_taken": "a snapshot for a round is in host memory only",
    "learner.upload_encoded": "a contribution is ready to be sent",
    "learner.upload_sent": "a contribution is on its way, the socket may hold half of it",
    "learner.applied": "a fragment was applied, the syncer has not heard",
    "learner.checkpoint_begun": "its own checkpoint is about to be written",
    "learner.checkpoint_written": "its own checkpoint is there, the syncer has not heard",
    "learner.finished": "the last step is done, nothing of it is handed in",
    "learner.finish_said": "it has said so, its last work is not merged",
    "learner.released": "its work is merged and on the disk, it has not left",
}
"""Name to the state in which the learner dies there."""

POINTS: tuple[str, ...] = (*SYNCER_POINTS, *LEARNER_POINTS)


class Armed:
    """The points at which this process is to die, and arrivals so far.

    Args:
        plan: the value of DD_CRASH.
        tape: file that gets a JSON line when a point fires.

    Raises:
        ValueError: `plan` names no point, or there is no tape to prove that it fired.
    """

    def __init__(self, plan: str, tape: str) -> None:
        self._left: dict[str, int] = {}  # arrivals until it fires
        self._tape = tape
        self._lock = threading.Lock()
        for item in plan.split(","):
            name, colon, nth = item.strip().partition(":")
            if name not in POINTS:
                raise ValueError(f"DD_CRASH names {name!r}; allowed: {', '.join(POINTS)}.")
            if colon and not (nth.isdecimal() and int(nth) > 0):
                raise ValueError(f"DD_CRASH is {item!r}; allowed: {name}:N with N from 1 on.")
            self._left[name] = int(nth) if colon else 1
        if not tape:
            raise ValueError("DD_CRASH_TAPE is unset; give the file that proves what fired.")

    def is_next(self, name: str) -> bool:
        """Whether the next arrival at `name` fires."""
        return self._left.get(name) == 1

    def arrive(self, name: str) -> None:
        """Count; die at the arrival that was planned."""
        with self._lock:
            left = self._left.get(name)
            if left is None:
                return
            self._left[name] = left - 1
            if left == 1:
                self._die(name)

    def _die(self, name: str) -> None:
        row = json.dumps({"point": name, "pid": os.getpid(), "wall_s": time.time()})
        descriptor = os.open(self._tape, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, f"{row}\n".encode())
        os.fsync(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60.0)  # the signal comes before this returns; no line after the point may run


def from_environment(environment: Mapping[str, str] = os.environ) -> Armed | None:
    """What DD_CRASH and DD_CRASH_TAPE say; None: nothing is armed."""
    plan = environment.get("DD_CRASH", "")
    return Armed(plan, environment.get("DD_CRASH_TAPE", "")) if plan else None


_armed = from_environment()


def arm(armed: Armed | None) -> None:
    """For a process that was forked after this module was imported."""
    global _armed
    _armed = armed


def reach(name: str) -> None:
    """This line of the program is the point `name`."""
    if _armed is not None:
        _armed.arrive(name)


def is_next(name: str) -> bool:
    """Whether `reach(name)` would kill: for points in the middle of one call of the system."""
    return _armed is not None and _armed.is_next(name)
