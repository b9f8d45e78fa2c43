"""The run's status as the syncer knows it: the core's, and what only its server can tell.

Bytes of the connections and their rates, odd peers, the last checkpoint, how long this syncer runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

RATE_S = 1.0  # bytes a second are measured over at least so long


class StatusBoard:
    """Makes the status; remembers what a status needs of the past.

    Args:
        core_status: the core's status at a time.
        wire_bytes: (up, down) of a session; KeyError when it is no longer known.
        odd: messages that were none of ours, and queries of operators that were refused.
    """

    def __init__(
        self,
        core_status: Callable[[float], dict[str, Any]],
        wire_bytes: Callable[[str], tuple[int, int]],
        odd: Callable[[], tuple[int, int]],
        began_s: float,
    ) -> None:
        self.checkpoint: tuple[str, float] | None = None  # file and when it was written
        self._core_status, self._wire_bytes, self._odd = core_status, wire_bytes, odd
        self._began_s = began_s
        self._sessions: dict[str, tuple[int, str]] = {}  # learner to its newest generation's
        self._bytes: dict[str, tuple[int, tuple[int, int]]] = {}  # learner: generation, last told
        self._marks: dict[str, tuple[int, float, int, int]] = {}  # generation, when, up, down
        self._rates: dict[str, tuple[float, float]] = {}

    def attached(self, learner: str, generation: int, session: str) -> None:
        """A learner was welcomed."""
        self._sessions[learner] = (generation, session)

    def bytes_of(self, learner: str, generation: int) -> tuple[int, int]:
        """(up, down) of that generation's connection; of one that ended, the last that was told."""
        attached, session = self._sessions.get(learner, (0, ""))
        if attached == generation:
            with contextlib.suppress(KeyError):
                self._bytes[learner] = (generation, self._wire_bytes(session))
        told = self._bytes.get(learner, (0, (0, 0)))
        return told[1] if told[0] == generation else (0, 0)

    def status(self, now: float) -> dict[str, Any]:
        """Plain JSON values."""
        status = self._core_status(now)
        for learner, row in status["learners"].items():
            up, down = self.bytes_of(learner, row["generation"])
            rates = self._rate(learner, row["generation"], now, up, down)
            row |= {"bytes_up": up, "bytes_down": down}
            row |= {"bytes_up_per_s": rates[0], "bytes_down_per_s": rates[1]}
        malformed, refused = self._odd()
        file, written_s = self.checkpoint or (None, None)
        return status | {
            "uptime_s": now - self._began_s,
            "malformed": malformed,
            "refused_queries": refused,
            "checkpoint": {
                "file": file,
                "age_s": None if written_s is None else now - written_s,
            },
        }

    def _rate(
        self, learner: str, generation: int, now: float, up: int, down: int
    ) -> tuple[float, float]:
        mark = self._marks.get(learner)
        if mark is None or mark[0] != generation:
            self._marks[learner] = (generation, now, up, down)
            self._rates[learner] = (0.0, 0.0)
        elif now - mark[1] >= RATE_S:
            span = now - mark[1]
            self._rates[learner] = ((up - mark[2]) / span, (down - mark[3]) / span)
            self._marks[learner] = (generation, now, up, down)
        return self._rates[learner]
