"""Outgoing fragments of one learner, conflated: only the newest unsent version of each waits.

[Without it a slow downlink applies values hundreds of steps old.] At most `window` fragments are
under way at a time, so that what waits stays here, where a newer version replaces it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dd_lightning.protocol.messages import Version


@dataclass(slots=True)
class Outbox:
    """Order of first offer is kept; an offer of a waiting fragment changes nothing."""

    waiting: dict[int, None] = field(default_factory=dict)
    under_way: dict[int, tuple[Version, float]] = field(default_factory=dict)

    def offer(self, fragment: int) -> None:
        """The fragment has a version this learner lacks."""
        self.waiting.setdefault(fragment)

    def withdraw(self, fragment: int) -> None:
        """Do not send it after all."""
        self.waiting.pop(fragment, None)

    def next(self, window: int) -> int | None:
        """The fragment to send now, or None; a fragment under way is not sent again yet."""
        if len(self.under_way) >= window:
            return None
        return next((p for p in self.waiting if p not in self.under_way), None)

    def sent(self, fragment: int, version: Version, now: float) -> None:
        """It went out."""
        self.waiting.pop(fragment, None)
        self.under_way[fragment] = (version, now)

    def received(self, fragment: int, version: Version) -> float | None:
        """The learner has it; the time it was sent, if this is the one under way."""
        entry = self.under_way.get(fragment)
        if entry is None or version < entry[0]:
            return None
        del self.under_way[fragment]
        return entry[1]

    def expire(self, before: float) -> list[int]:
        """Fragments sent before that time and never acknowledged; they wait again."""
        late = [p for p, (_, sent) in self.under_way.items() if sent < before]
        for fragment in late:
            del self.under_way[fragment]
            self.waiting.setdefault(fragment)
        return late
