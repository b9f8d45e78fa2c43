"""Messages of a consistent cut of the whole run (`cut.py` says how it goes)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from dd_lightning.protocol.message_base import Count, Message, Name

Text = Annotated[str, msgspec.Meta(max_length=4096)]


class TakeCut(Message):
    """Syncer to learner: record your state for cut `cut` at the end of the next batch, or, with
    `at_clock`, of the first one at which your own schedule clock has reached it. Repeated."""

    generation: int
    cut: Name
    at_clock: int | None = None


class CutOver(Message):
    """Syncer to learner: the cut is done, or (not `complete`) came to nothing."""

    generation: int
    cut: Name
    complete: bool


class CutRecorded(Message):
    """Learner to syncer: its state of after `step` and `odometer` is its part of the cut. What it
    contributes and applies from here on carries the cut's id."""

    generation: Count
    cut: Name
    step: Count
    odometer: Count


class CutTaken(Message):
    """Learner to syncer: its part is on disk under `file`; or, with `error`, is not, and why."""

    generation: Count
    cut: Name
    file: Text = ""
    error: Text = ""
