"""A join whose id is held by a process that may be dead already is tried again, with back-off.

The syncer may not have seen the holder's connection close; by the end of the holder's lease it
knows. A holder that is there after that is alive, and the join has failed.
"""

from __future__ import annotations

from dataclasses import dataclass

PAUSES_S = (0.25, 2.0)  # first and longest pause between two joins


@dataclass(slots=True)
class IdWait:
    """All times in seconds of the caller's clock."""

    again_s: float | None = None  # when to join again; None: not waiting
    until_s: float | None = None  # the lease that the first refusal found is over
    pause_s: float = PAUSES_S[0]

    def due_s(self, sent_s: float, repeat_s: float) -> float:
        """When the join sent at `sent_s` is repeated for want of an answer, or made anew."""
        return sent_s + repeat_s if self.again_s is None else self.again_s

    def refused(self, sent_s: float, retry_s: float, now: float) -> bool:
        """The join sent at `sent_s` was refused, to be tried again for `retry_s`; False: it was
        sent after all that time, so the id is held by a living process."""
        if self.until_s is None:
            self.until_s = now + retry_s
        if sent_s >= self.until_s:
            return False
        self.again_s = min(now + self.pause_s, self.until_s)
        self.pause_s = min(2 * self.pause_s, PAUSES_S[1])
        return True
