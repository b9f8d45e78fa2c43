"""Refusals on the tape, bounded: what is repeated becomes one row a minute with a count.

Whoever joins in a loop, under one id or under ever new ones, adds at most `MOST_IDS` + 1 rows a
minute; a member with refused contributions `MOST_ROWS` + 1 for each reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dd_lightning.protocol.run_state import RunState

EVERY_S = 60.0
MOST_IDS = 64
OTHERS = "(others)"  # learner ids beyond that, together
MOST_ROWS = 60  # `contribution` rows of one learner and reason in a minute


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


@dataclass(slots=True)
class _Minute:
    """Refused contributions of one learner and reason since `since_s`."""

    since_s: float
    rows: int = 0
    count: int = 0  # beyond those rows


@dataclass(slots=True)
class RefusedContributions:
    """Which refused contributions have a row of their own: in ordinary operation all, for a learner
    is refused at most once a round; the repeats of a wrong one lose the details, not the count."""

    run: RunState
    _minutes: dict[tuple[str, str], _Minute] = field(default_factory=dict)

    def has_row(self, learner: str, reason: str, now: float) -> bool:
        """One more was refused: whether it is told in full; otherwise it is counted here."""
        self.tick(now)
        minute = self._minutes.setdefault((learner, reason), _Minute(now))
        if minute.rows < MOST_ROWS:
            minute.rows += 1
            return True
        minute.count += 1
        return False

    def tick(self, now: float) -> None:
        """Minutes that are over: their counts go to the tape."""
        for key, minute in list(self._minutes.items()):
            if now >= minute.since_s + EVERY_S:
                self._say(key)

    def close(self) -> None:
        """The run ends: what has not been said."""
        for key in list(self._minutes):
            self._say(key)

    def deadlines(self) -> list[float]:
        """When the next row is due."""
        return [minute.since_s + EVERY_S for minute in self._minutes.values() if minute.count]

    def _say(self, key: tuple[str, str]) -> None:
        learner, reason = key
        minute = self._minutes.pop(key)
        if minute.count:
            reason = f"contribution: {reason}"
            self.run.record("refused", reason=reason, count=minute.count, learner=learner)
