"""What a learner's link knows of inner state: its own description, and what it donates.

A donation ends with the connection it goes over; the syncer then asks another learner.
"""

from __future__ import annotations

from msgspec.structs import replace

from dd_lightning.protocol.messages import (
    DonateState,
    Inner,
    Message,
    StateChunk,
    StateOver,
    Welcome,
)
from dd_lightning.protocol.transfer import Entry, StateSource


class InnerLink:
    """Held by the link, in the thread that drives it."""

    def __init__(self, wants_state: bool) -> None:
        self.wants_state = wants_state
        self.described: Inner | None = None  # said after every welcome
        self._source: StateSource | None = None
        self._asked = (0, 0)  # transfer, chunks allowed: may come before the copy is there

    def welcomed(self, welcome: Welcome) -> None:
        """What is decided once stays: no state will come to who was welcomed without."""
        self.wants_state = self.wants_state and welcome.donated

    def begins(self, message: DonateState) -> bool:
        """Whether this asks for a copy (to be handed to the training side), or for more chunks."""
        begins = message.transfer != self._asked[0]
        upto = message.upto if begins else max(message.upto, self._asked[1])
        self._asked = (message.transfer, upto)
        if self._source is not None and self._source.transfer == message.transfer:
            self._source.allow(upto)
        return begins

    def donate(self, source: StateSource) -> None:
        """The copy is there."""
        transfer, upto = self._asked
        if source.transfer == transfer:  # else it is wanted no longer
            source.allow(upto)
            self._source = source

    def provide(self, transfer: int, entry: Entry, data: memoryview) -> None:
        """Bytes of the copy, where it comes in pieces."""
        if self._source is not None and self._source.transfer == transfer:
            self._source.provide(entry, data)

    def over(self, message: StateOver) -> None:
        """Nothing more of that transfer is wanted."""
        if message.transfer == self._asked[0]:
            self.drop()

    def drop(self) -> None:
        """The connection is gone."""
        self._source, self._asked = None, (0, 0)

    @property
    def ready(self) -> bool:
        """Whether a chunk may be sent."""
        return self._source is not None and self._source.ready

    def next_chunk(self, generation: int) -> tuple[Message, memoryview] | None:
        """The next chunk to send, and its bytes."""
        if self._source is None or not self._source.ready:
            return None
        chunk, data = self._source.take()
        if self._source.over:
            self._source = None
        stamped: StateChunk = replace(chunk, generation=generation)
        return stamped, data
