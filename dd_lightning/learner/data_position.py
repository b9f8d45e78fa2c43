"""Where a learner's data begins: at its checkpoint's position, or further on if it lived longer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dd_lightning.learner.session import LearnerSession

log = logging.getLogger(__name__)


def can_skip(datamodule: Any) -> bool:
    """Whether the user's datamodule has `skip_to(batches)`."""
    return callable(getattr(datamodule, "skip_to", None))


def begin(session: LearnerSession, datamodule: Any) -> None:
    """Of a learner that has just joined, before any dataloader is made."""
    assert session.welcome is not None  # it has joined
    known = session.welcome.data_position
    session.data_position = position_of(datamodule, session.data_position, known)


def position_of(datamodule: Any, own: int, known: int) -> int:
    """The position, in micro-batches, at which the data begins; the datamodule is told.

    Never backward: the greater of both. A datamodule without `skip_to` begins at `own`, and what
    was drawn between the two is drawn again, which is said once.

    Args:
        own: of the checkpoint that was loaded, 0 without one.
        known: the highest that the syncer has heard of for this learner's part of the data.
    """
    position = max(own, known)
    if can_skip(datamodule):
        if position:
            datamodule.skip_to(position)
        return position
    if position > own:
        log.warning(
            "%d batches of this learner's data were used in its earlier lives, %d of them before "
            "the checkpoint it goes on from; the %d after that are drawn again: the datamodule has "
            "no skip_to(batches), which would be told to begin after the first %d",
            position, own, position - own, position,
        )  # fmt: skip
    return own
