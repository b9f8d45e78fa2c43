"""What a learner was asked to record for a consistent cut, and what it has said of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from dd_lightning.protocol.messages import CutOver, CutRecorded, CutTaken, Message, TakeCut


class CutOrders:
    """Orders are repeated: what was said of one that is done already is said again.

    Args:
        say: sends a message; from any thread.
    """

    def __init__(self, say: Callable[[Message], None]) -> None:
        self.order: TakeCut | None = None  # not recorded yet
        self.all_know: bool | None = None  # of a group: whether every rank knows of an order
        self._say = say
        self._recorded: CutRecorded | None = None
        self._taken: CutTaken | None = None

    @property
    def is_ordered(self) -> bool:
        """Whether a part is to be recorded, now or later."""
        return self.order is not None if self.all_know is None else self.all_know

    def heard(self, message: TakeCut | CutOver) -> None:
        """An order, or word that the cut is over."""
        if isinstance(message, CutOver):
            if self.order is not None and self.order.cut == message.cut:
                self.order = None
        elif self._recorded is None or self._recorded.cut != message.cut:
            self.order = message
        else:
            self._say(self._recorded)
            if self._taken is not None and self._taken.cut == message.cut:
                self._say(self._taken)

    def recorded(self, cut: str, step: int, odometer: int) -> None:
        """The record is made."""
        self.order, self._taken = None, None
        self._recorded = CutRecorded(generation=0, cut=cut, step=step, odometer=odometer)
        self._say(self._recorded)

    def refuse(self, why: str) -> None:
        """This learner cannot record its part: the cut fails at once, in these words."""
        order, self.order = self.order, None
        assert order is not None  # there is one to refuse
        self.say_taken(CutTaken(generation=0, cut=order.cut, error=why))

    def say_taken(self, taken: CutTaken) -> None:
        """It is on disk, or not; called in the writing thread."""
        self._taken = taken
        self._say(taken)


def warn_of_another_state(cut: str) -> None:
    """A learner was restored from its part of a cut, the run was not."""
    warnings.warn(
        f"the checkpoint is this learner's part of cut {cut}, but the run was not restored from "
        "that cut: it joins as from any checkpoint, and takes Θ. To restore the whole, start the "
        f"syncer with --resume --cut {cut}.",
        stacklevel=3,
    )
