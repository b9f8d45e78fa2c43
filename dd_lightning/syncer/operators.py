"""What the syncer answers to operators: the status at once, a checkpoint when its cut is done.

Bounded on purpose: a session waits for one answer at a time, gets at most `MOST_A_SECOND`, and is
closed with an error in words when it asks more; the status is made at most once in `FRESH_S` for
all of them. So nobody who may ask can slow the run by asking.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dd_lightning.protocol.messages import Answer, Message, Query

MOST_A_SECOND = 5
FRESH_S = 0.2  # a status so old is given again
MOST_SESSIONS = 64  # operators at a time
WHAT = ("status", "checkpoint")


class Line(Protocol):
    """What is needed of `transport.SyncerChannel`."""

    def send(self, session: str, message: Message) -> bool: ...
    def close_session(self, session: str) -> None: ...


@dataclass(slots=True)
class _Operator:
    left: float = MOST_A_SECOND  # queries it may ask now
    asked_s: float = 0.0


class Operators:
    """Answers queries.

    Args:
        status: makes the status at a time.
        request_cut: starts a consistent cut and returns its id; raises ValueError, saying why not.
    """

    def __init__(
        self,
        line: Line,
        status: Callable[[float], dict[str, Any]],
        request_cut: Callable[[float], str],
    ) -> None:
        self.refused = 0  # queries that got no proper answer
        self._line, self._make_status, self._request_cut = line, status, request_cut
        self._status: dict[str, Any] = {}
        self._status_s = float("-inf")
        self._sessions: dict[str, _Operator] = {}
        self._waiting: dict[str, tuple[str, int]] = {}  # session to (cut, number of the query)

    def asked(self, session: str, query: Query, now: float) -> None:
        """A query has come."""
        objection = self._objection(session, now)
        if objection:
            self.refused += 1
            self._refuse(session, query, objection)
            self.forget(session)
            self._line.close_session(session)
        elif query.what == "status":
            self._answer(session, query.number, self._fresh_status(now))
        elif query.what != "checkpoint":
            self.refused += 1
            self._refuse(session, query, f"what is {query.what!r}; allowed: {' | '.join(WHAT)}")
        elif session in self._waiting:
            self._refuse(session, query, "a checkpoint that you asked for is under way")
        else:
            self._checkpoint(session, query, now)

    def cut_done(self, cut: str, body: Mapping[str, Any]) -> None:
        """The cut's files are written."""
        for session, number in self._take_waiting(cut):
            self._answer(session, number, {"cut": cut, **body})

    def cut_failed(self, cut: str, reason: str) -> None:
        """The cut came to nothing."""
        for session, number in self._take_waiting(cut):
            self._line.send(session, Answer(number=number, body={"cut": cut}, error=reason))

    def forget(self, session: str) -> None:
        """The session has ended; a cut that it asked for goes on."""
        self._sessions.pop(session, None)
        self._waiting.pop(session, None)

    def _objection(self, session: str, now: float) -> str:
        """Why this session may not ask now, or ""."""
        known = self._sessions.get(session)
        if known is None:
            if len(self._sessions) >= MOST_SESSIONS:
                return f"{MOST_SESSIONS} operators are connected, which is the most; try later"
            known = self._sessions[session] = _Operator(asked_s=now)
        gained = (now - known.asked_s) * MOST_A_SECOND
        known.left, known.asked_s = min(MOST_A_SECOND, known.left + gained), now
        if known.left < 1:
            return f"asked more than {MOST_A_SECOND} times a second"
        known.left -= 1
        return ""

    def _fresh_status(self, now: float) -> dict[str, Any]:
        if now - self._status_s >= FRESH_S:
            self._status, self._status_s = self._make_status(now), now
        return self._status

    def _checkpoint(self, session: str, query: Query, now: float) -> None:
        try:
            cut = self._request_cut(now)
        except ValueError as error:
            self._refuse(session, query, str(error))
            return
        self._waiting[session] = (cut, query.number)

    def _take_waiting(self, cut: str) -> list[tuple[str, int]]:
        found = [(s, number) for s, (of, number) in self._waiting.items() if of == cut]
        for session, _ in found:
            del self._waiting[session]
        return found

    def _answer(self, session: str, number: int, body: dict[str, Any]) -> None:
        self._line.send(session, Answer(number=number, body=body))

    def _refuse(self, session: str, query: Query, reason: str) -> None:
        self._line.send(session, Answer(number=query.number, error=reason))
