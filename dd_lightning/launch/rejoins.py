"""Which processes take part in the run, as its tape says: joined, and at work after a restart.

A learner's life is at work from its first finished step (or when it had none left to do), a
syncer's from its first merge (or when it ended the run in order).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

SYNCER = "syncer"
STARTED, JOINED, AT_WORK = "started", "joined", "at work"
KINDS = ("syncer_start", "merge", "run_end", "join", "state", "leave", "dead")


class Rejoins:
    """Follows the stage of every process by role; `feed` it the tape in order."""

    def __init__(self) -> None:
        self.members: set[str] = set()  # ids of the learners that are in the run now
        self._stages: dict[str, str] = {}
        self._again: set[str] = set()  # roles that were started again
        self._new: list[str] = []
        self._epoch = 0

    def started(self, role: str) -> None:
        """A life of this role begins; what the tape says from now on is about it."""
        self._stages[role] = STARTED

    def expected(self, role: str) -> None:
        """The role's life has ended and it is to be started again."""
        self._stages[role] = STARTED
        self._again.add(role)

    def feed(self, event: dict[str, Any]) -> None:
        """The next event of the tape."""
        kind = event["event"]
        if kind == "syncer_start":
            self._epoch = event["epoch"]
            self.members.clear()  # those that live re-attach
            self._reach(SYNCER, JOINED)
        elif kind == "merge":
            if event["epoch"] == self._epoch:
                self._reach(SYNCER, AT_WORK)
        elif kind == "run_end":
            if event["status"] == "finished":
                self._reach(SYNCER, AT_WORK)
        elif kind == "join":
            self.members.add(event["learner"])
            if event["cause"] == "join":  # a new process; not a re-attach of the old one
                self._reach(learner_role(event["learner"]), JOINED)
        elif kind == "state" and event["state"] in ("training", "finishing"):
            self._reach(learner_role(event["learner"]), AT_WORK)
        elif kind in ("leave", "dead"):
            self.members.discard(event["learner"])

    def listens(self, role: str) -> None:
        """A process that serves the others can be reached: that is all its work."""
        self._reach(role, JOINED)
        self._reach(role, AT_WORK)

    def has_joined(self, role: str) -> bool:
        """Whether this life of the role has."""
        return self._stages.get(role, STARTED) != STARTED

    def newly_joined(self) -> list[str]:
        """Roles whose life has joined since the last call."""
        found, self._new = self._new, []
        return found

    def missing(self) -> list[str]:
        """One sentence for each process that died, was expected back, and is not at work again."""
        return [
            f"{role} died, and its next life {self._short_of(role)} when the run ended"
            for role in sorted(self._again)
            if self._stages[role] != AT_WORK
        ]

    def _short_of(self, role: str) -> str:
        if self._stages[role] == STARTED:
            return "had not joined"
        return "had merged nothing yet" if role == SYNCER else "had not finished a step"

    def _reach(self, role: str, stage: str) -> None:
        now = self._stages.get(role)
        if now is None or now in (stage, AT_WORK):
            return  # not ours (an unplanned learner), or known
        if now == STARTED and stage == AT_WORK:
            return  # said of the life before, which the syncer had heard and not yet written
        self._stages[role] = stage
        if now == STARTED:
            self._new.append(role)


class TapeTail:
    """The events of `KINDS` that a growing tape has got since the last look.

    Args:
        skip: bytes of the tape that are an earlier start's.
    """

    def __init__(self, path: Path, skip: int = 0) -> None:
        self._path, self._position = path, skip
        self._wanted = tuple(f'{{"event":"{kind}"'.encode() for kind in KINDS)

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines only; a torn one is read once it is whole, or cut off by its writer."""
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._position += len(line)
                if line.startswith(self._wanted):
                    yield msgspec.json.decode(line, type=dict[str, Any])


def learner_role(learner: str) -> str:
    """How the launcher calls the process of this learner."""
    return f"learner {learner}"
