"""Which process that ended is started again, when, and when that is given up. No process in here.

A life that ends before it has joined the run is a failed start: those are tried again ever more
slowly, and given up when they end in the same way again and again (a crash loop).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

DONE, LEFT, RESTART, GIVE_UP = "done", "left", "restart", "give up"

FINISHED_CODE = 0
KILLED_CODE = -signal.SIGKILL
WRONG_SETTING_CODE = 2  # the same again however often it is started
LEFT_CODE = 130  # it was told to end (SIGINT, SIGTERM) and did, in order
LEFT_CODES = (LEFT_CODE, -signal.SIGTERM, -signal.SIGINT)  # the signals: before it had begun
CRASH_LOOP = 5  # failed starts in a row with the same end
MOST_BACK_OFF_S = 30.0
ENOUGH_RESTARTS = 20  # `launcher.max_restarts: auto` where the chaos plan kills


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do about a process that ended: `what` is one of the four words above."""

    what: str
    why: str
    restart_s: float | None = None  # when, on the caller's clock


@dataclass(slots=True)
class _History:
    restarts: int = 0
    due_s: float | None = None
    joined: bool = False  # this life has
    failed_starts: int = 0  # in a row
    last_code: int | None = None  # of the failed starts


@dataclass(slots=True)
class Supervisor:
    """Decides over the processes of one run, by role ("syncer", "learner 0", ...).

    What a restart loses is the role's own matter: a learner its tokens since its last
    contribution, the syncer its merges since the last checkpoint, the proxy what was on its way.

    Args:
        max_restarts: of each process; 0: none is ever started again.
        restart_after_s: from the end of a process to its next start; doubled by each failed start.
    """

    max_restarts: int
    restart_after_s: float
    _histories: dict[str, _History] = field(default_factory=dict)

    def joined(self, role: str) -> None:
        """This life takes part in the run: its end will not be a failed start."""
        history = self._of(role)
        history.joined, history.failed_starts, history.last_code = True, 0, None

    def ended(self, role: str, code: int, now: float) -> Verdict:
        """The process has ended; `code` negative: by that signal. `now`: seconds, monotonic."""
        history = self._of(role)
        if code == FINISHED_CODE:
            return Verdict(DONE, "it has finished")
        if code in LEFT_CODES:
            return Verdict(LEFT, "it was told to end and left in order")
        if code == WRONG_SETTING_CODE:
            return Verdict(GIVE_UP, "a wrong setting: started again it would end the same way")
        if history.restarts >= self.max_restarts:
            return Verdict(GIVE_UP, self._spent(history))
        if self._is_loop(history, code):
            return Verdict(
                GIVE_UP, f"a crash loop: {CRASH_LOOP} starts in a row ended {how_ended(code)}"
            )
        wait_s = self.restart_after_s * 2 ** max(0, history.failed_starts - 1)
        history.due_s = now + min(wait_s, max(MOST_BACK_OFF_S, self.restart_after_s))
        return Verdict(RESTART, how_ended(code), history.due_s)

    def due(self, now: float) -> list[str]:
        """Roles whose restart is due; each is handed out once and counts as started."""
        found = []
        for role, history in self._histories.items():
            if history.due_s is not None and now >= history.due_s:
                history.due_s = None
                history.restarts += 1
                history.joined = False
                found.append(role)
        return found

    @property
    def waiting(self) -> list[str]:
        """Roles that will be started again."""
        return [role for role, one in self._histories.items() if one.due_s is not None]

    def restarts(self, role: str) -> int:
        """How often it was started again."""
        return self._of(role).restarts

    def cancel(self) -> None:
        """No restart is due any more."""
        for history in self._histories.values():
            history.due_s = None

    def _of(self, role: str) -> _History:
        return self._histories.setdefault(role, _History())

    def _spent(self, history: _History) -> str:
        if not self.max_restarts:
            return "launcher.max_restarts is 0"
        return f"it was started again {history.restarts} times (launcher.max_restarts)"

    @staticmethod
    def _is_loop(history: _History, code: int) -> bool:
        """Counts a failed start; whether it is one too many."""
        if history.joined:
            return False
        history.failed_starts = history.failed_starts + 1 if history.last_code == code else 1
        history.last_code = code
        return history.failed_starts >= CRASH_LOOP


def how_ended(code: int) -> str:
    """An exit code in words."""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
