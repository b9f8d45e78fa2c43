"""Where the data of each slot goes on: the highest position heard of, over all lives of its owners.

A position counts the micro-batches drawn from a slot. Data belongs to slots, so whoever has a slot
next goes on where its last owner was last heard of. Lost by a learner killed: the batches after its
last report, which are drawn again (at most `steps_unreported_max` steps' and those of the step it
was in); by a syncer killed: its checkpoint's positions stand until a living learner reports again,
so one that died meanwhile draws again what it drew after that checkpoint, or after its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from dd_lightning.protocol.messages import Join


class DataPositions:
    """At most one number a slot."""

    def __init__(self, rows: Iterable[Iterable[int]] = ()) -> None:
        self._of = {slot: position for slot, position in rows}

    def heard(self, slot: int, position: int) -> None:
        """A report, late ones included: never backward."""
        if position > self._of.get(slot, 0):
            self._of[slot] = position

    def admit(self, slot: int, join: Join, *, resumes: bool) -> tuple[int, int]:
        """Where the slot's data goes on for that process, and where the process begins it: the
        latter is its own position where it cannot skip.

        Args:
            resumes: it carries on its part of a cut that the run was restored from. What was drawn
                after the cut is undone with all else, and is to be drawn again.
        """
        if resumes:
            self._of[slot] = join.data_position
        if resumes or (join.continues and not join.cut):
            self.heard(slot, join.data_position)
            return join.data_position, join.data_position
        self.heard(slot, join.data_position)
        known = self._of.get(slot, 0)
        return known, known if join.skips else join.data_position

    def state(self) -> list[list[int]]:
        """(slot, position) of every slot that was drawn from; the constructor takes it."""
        return [[slot, position] for slot, position in sorted(self._of.items())]
