"""Messages by which a learner gets the inner optimizer's state of another one.

Donor and receiver are learners; every message goes to the syncer or comes from it (`donations.py`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from dd_lightning.protocol.message_base import Count, Message


class StatePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Elements [offset, offset + length) of one entry of an inner optimizer's state.

    `number`: a plain number of the optimizer, sent as one float64 or int64 element.
    """

    optimizer: Count  # which of the learner's optimizers
    parameter: str  # canonical name
    key: str  # as "exp_avg"
    dtype: str
    shape: tuple[Count, ...]
    offset: Count
    length: Count
    number: bool = False


class StatePayload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Describes the bytes beside a `StateChunk`: the parts' elements, raw, in order."""

    parts: tuple[StatePart, ...]
    num_bytes: int
    digest: str  # crc32 of the bytes, eight hex digits


class Inner(Message):
    """The learner's inner optimizer, by a digest of its description ("": its state cannot travel).
    Said after every welcome, and again and again while it waits for a peer's state."""

    generation: Count
    optimizer: Annotated[str, msgspec.Meta(max_length=64)]


class StateChunk(Message):
    """*Payload.* Donor to syncer to receiver: piece `chunk` of the inner optimizer's state that the
    donor held after `step`. `last`: none comes after it."""

    generation: Count
    transfer: Count
    chunk: Count
    last: bool
    step: Count
    payload: StatePayload


class StateReceived(Message):
    """The receiver has every chunk below `chunks`: the donor may send as many more."""

    generation: Count
    transfer: Count
    chunks: Count


class StateLoaded(Message):
    """The receiver has loaded the state that its donor held after `step`, and begins to train."""

    generation: Count
    transfer: Count
    step: Count


class StateFailed(Message):
    """Donor or receiver cannot go on with a transfer (receiver, `transfer` 0: waits no longer)."""

    generation: Count
    transfer: Count
    reason: Annotated[str, msgspec.Meta(max_length=1000)]


class DonateState(Message):
    """To the donor: send the chunks of `transfer` below `upto`. The first one asks for the copy of
    the state at the next step boundary; `upto` grows as the receiver acknowledges."""

    generation: int
    transfer: int
    upto: int


class StateComing(Message):
    """To a receiver, whenever it describes its optimizer: it is waited for rightly, although
    donors may be busy."""

    generation: int


class StateOver(Message):
    """To the donor: nothing more of that transfer is wanted. To the receiver (`transfer` 0): no
    state comes, begin without."""

    generation: int
    transfer: int
    reason: str
