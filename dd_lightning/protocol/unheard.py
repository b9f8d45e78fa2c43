"""Applies that the syncer may never have heard of: the next join states them, for its tape.

Nothing confirms an `Applied`. But what was said before a numbered report had come in when that is
answered, since control messages arrive in order; the rest may have gone down with the connection or
the syncer. Without them a tape lacks what changed the parameters, and no replay could be exact.
"""

from __future__ import annotations

from collections import deque

from dd_lightning.protocol.messages import Applied, ApplyDone

MOST = 512  # while nothing is heard no fragment comes either, so it is never so many


class UnheardApplies:
    """Of one learner process, over all its connections; the last `MOST` of them."""

    def __init__(self) -> None:
        self._said: deque[tuple[int, ApplyDone]] = deque(maxlen=MOST)

    def said(self, applied: Applied, ping: int) -> None:
        """It was sent (or could not be) after the report numbered `ping`."""
        self._said.append((ping, (applied.step, applied.fragment, applied.version)))

    def answered(self, ping: int) -> None:
        """The answer to that report has come, on the connection it was sent on."""
        while self._said and self._said[0][0] < ping:
            self._said.popleft()

    def stated(self, ping: int) -> None:
        """A join with all of them was answered; a syncer that dies now may still forget them."""
        self._said = deque(((ping, done) for _, done in self._said), MOST)

    @property
    def all(self) -> tuple[ApplyDone, ...]:
        """In the order in which they were done."""
        return tuple(done for _, done in self._said)
