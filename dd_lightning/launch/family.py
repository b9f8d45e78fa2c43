"""The processes of a run by role, and their restarts: reaps, starts again, restores priorities.

Roles: "syncer", "proxy", "evaluator", "learner ID". A process that is started again runs nicely
until it has joined, so that its imports do not slow the others' steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dd_lightning.launch.processes import Child
from dd_lightning.launch.rejoins import SYNCER, Rejoins, TapeTail, learner_role
from dd_lightning.launch.roles import Roles
from dd_lightning.launch.supervision import GIVE_UP, RESTART, Supervisor, Verdict

PROXY, EVALUATOR = "proxy", "evaluator"
RESTART_NICE = 10


@dataclass(frozen=True, slots=True)
class Ended:
    """A process that has ended and been reaped, and what is done about it."""

    role: str
    child: Child
    verdict: Verdict


class Family:
    """Owns every child of a run but none of its outcome.

    Args:
        tape: of the run, from which it is known who has joined.
        say: shows a message that stays.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        roles: Roles,
        supervisor: Supervisor,
        tape: Path,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children: dict[str, Child] = {}  # those running
        self.rejoins = Rejoins()
        self._roles, self._supervisor, self._say = roles, supervisor, say
        self._clock = clock
        self._tail = TapeTail(tape, tape.stat().st_size if tape.exists() else 0)
        self._nice: set[str] = set()
        self._stay_nice = False

    def pid(self, role: str) -> int | None:
        """Process id of the role's running process."""
        child = self.children.get(role)
        return None if child is None or child.exit_code() is not None else child.pid

    def at_work(self, role: str) -> Child | None:
        """The role's running process once it has joined (the proxy: at once)."""
        is_there = role == PROXY or self.rejoins.has_joined(role)
        return self.children.get(role) if is_there else None

    def start(self, role: str, resume: bool = False) -> Child:
        """Start a role's first process of this launch.

        Args:
            resume: of the syncer: go on with the run of the folder.
        """
        return self._start(role, resume, nice=0)

    def _start(self, role: str, again: bool, nice: int) -> Child:
        if role == SYNCER:
            child = self._roles.start_syncer(resume=again, nice=nice)
        elif role == PROXY:
            child = self._roles.start_proxy(again=again, nice=nice)
        elif role == EVALUATOR:
            child = self._roles.start_evaluator()
        else:
            child = self._roles.start_learner(role.removeprefix(learner_role("")), nice=nice)
        self.children[role] = child
        self.rejoins.started(role)
        return child

    def reap(self) -> list[Ended]:
        """Those that have ended; restarts among them are noted, for `restart_due`."""
        found = []
        for role, child in list(self.children.items()):
            if (code := child.exit_code()) is None:
                continue
            del self.children[role]
            child.kill()  # what it may have started itself
            self._nice.discard(role)
            self.follow()  # what the tape says so far is about the life that has ended
            verdict = self._judge(role, code)
            if verdict.what == RESTART:
                self.rejoins.expected(role)
                self._say(f"{child.description()}; it is started again")
            found.append(Ended(role, child, verdict))
        return found

    def _judge(self, role: str, code: int) -> Verdict:
        if role == EVALUATOR:  # the launcher alone ends it in order, after the run
            return Verdict(GIVE_UP, "an evaluator is not started again")
        return self._supervisor.ended(role, code, self._clock())

    def restart_due(self) -> None:
        """Start again those whose time has come."""
        for role in self._supervisor.due(self._clock()):
            self.follow()
            self._start(role, again=True, nice=RESTART_NICE)
            self._nice.add(role)

    def follow(self) -> None:
        """Read the tape on: who has joined is nice no longer, and its start did not fail."""
        for event in self._tail.new():
            self.rejoins.feed(event)
        proxy = self.children.get(PROXY)
        if proxy is not None and PROXY in self._nice and proxy.said("ready") is not None:
            self.rejoins.listens(PROXY)  # the tape knows of no proxy
        for role in self.rejoins.newly_joined():
            self._supervisor.joined(role)
            if role in self._nice:
                self._nice.discard(role)
                self._restore_priority(role)

    def _restore_priority(self, role: str) -> None:
        child = self.children.get(role)
        if child is None or child.renice() or self._stay_nice:
            return
        self._stay_nice = True  # said once
        self._say(
            f"{role} keeps nice {RESTART_NICE}, as will every process that is started again: this "
            "user may not raise a priority (root may)"
        )

    @property
    def waiting(self) -> list[str]:
        """Roles that will be started again."""
        return self._supervisor.waiting

    def expect_no_more(self) -> None:
        """The run is over: nobody is started again."""
        self._supervisor.cancel()

    def learners(self) -> Iterator[tuple[str, Child]]:
        """Running learners by id."""
        prefix = learner_role("")
        for role, child in list(self.children.items()):
            if role.startswith(prefix):
                yield role.removeprefix(prefix), child
