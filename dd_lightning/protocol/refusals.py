"""Refused joins on the tape: the first of a learner id at once, then one row a minute with a count.

Whoever joins in a loop, under one id or under ever new ones, adds at most `MOST_IDS` + 1 rows a
minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dd_lightning.protocol.run_state import RunState

EVERY_S = 60.0
MOST_IDS = 64
OTHERS = "(others)"  # learner ids beyond that, together


@dataclass(slots=True)
class _Unsaid:
    """Refusals of one learner id since its last row."""

    said_s: float
    reason: str
    count: int = 0


@dataclass(slots=True)
class RefusedJoins:
    """Counts refused joins by learner id; `tick` writes what is due and forgets the quiet ones."""

    run: RunState
    _unsaid: dict[str, _Unsaid] = field(default_factory=dict)

    def add(self, learner: str, reason: str, now: float) -> None:
        """One more join of that id was refused."""
        self.run.refusals += 1
        self.tick(now)
        if learner not in self._unsaid and len(self._unsaid) >= MOST_IDS:
            learner = OTHERS
        entry = self._unsaid.get(learner)
        if entry is None:
            self._unsaid[learner] = _Unsaid(now, reason)
            self.run.record("refused", reason=reason, count=1, learner=learner)
        else:
            entry.reason, entry.count = reason, entry.count + 1

    def tick(self, now: float) -> None:
        """Minutes that are over: their counts go to the tape."""
        for learner, entry in list(self._unsaid.items()):
            if now >= entry.said_s + EVERY_S:
                self._say(learner, entry)
                if not entry.count:
                    del self._unsaid[learner]
                entry.said_s, entry.count = now, 0

    def close(self) -> None:
        """The run ends: what has not been said."""
        for learner, entry in self._unsaid.items():
            self._say(learner, entry)
        self._unsaid.clear()

    def deadlines(self) -> list[float]:
        """When the next row is due."""
        return [entry.said_s + EVERY_S for entry in self._unsaid.values() if entry.count]

    def _say(self, learner: str, entry: _Unsaid) -> None:
        if entry.count:
            self.run.record("refused", reason=entry.reason, count=entry.count, learner=learner)
