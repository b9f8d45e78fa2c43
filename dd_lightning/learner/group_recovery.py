"""Transfers of inner state to and from a learner that is a group, as rank 0 sees them.

A sharded donor copies its slices between two steps, as one of a process its tensors; at later
boundaries they are put together entry by entry, at most `AHEAD_BYTES` (or one entry) at each. What
a failure loses: as of a learner of one process; a donor that pauses or ends stops giving, and after
`timeouts.donor` another one is asked.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dd_lightning.learner.group_inner import GroupInnerState
from dd_lightning.learner.recovery import InnerExchange
from dd_lightning.protocol.messages import DonateState
from dd_lightning.protocol.transfer import (
    CHUNK_BYTES,
    WINDOW,
    Assembly,
    Entry,
    StateSource,
    TransferError,
)

AHEAD_BYTES = WINDOW * CHUNK_BYTES  # put together and not sent yet


class GroupExchange(InnerExchange):
    """Of rank 0; everything is called in a section of the group, but `settled`."""

    _state: GroupInnerState

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._source: StateSource | None = None
        self._left: deque[Entry] = deque()  # not put together yet
        self._given_bytes = 0

    @property
    def has_work(self) -> bool:
        """Whether the next boundary is to be one of all ranks."""
        return self._asked is not None or bool(self._left)

    def _new_assembly(self, transfer: int) -> Assembly:
        self._state.begin()
        return super()._new_assembly(transfer)

    def _use(self, assembly: Assembly) -> None:
        for entry, data in assembly.completed():
            self._state.stage(entry, data)
        if assembly.complete:
            self._state.commit()

    def _begin_copy(self, asked: DonateState, step: int) -> None:
        if not self._state.in_shards:
            super()._begin_copy(asked, step)
            return
        self._forget_copy()
        try:
            entries = self._state.copy_slices(self._copies)
        except TransferError:
            self._state.forget()
            raise
        self._left, self._given_bytes = deque(entries), 0
        self._source = StateSource(asked.transfer, step, [(entry, None) for entry in entries])
        self._call(self._link.inner.donate, self._source)

    def boundary(self, step: int) -> None:
        """Begin the copy that was asked for; put together what may be sent next."""
        super().boundary(step)
        source, begun = self._source, self._given_bytes
        if source is None:
            return
        while self._left:
            ahead = self._given_bytes - source.taken_bytes
            if max(ahead, self._given_bytes - begun) >= AHEAD_BYTES:
                return
            entry = self._left.popleft()
            data = self._state.whole(entry)
            self._given_bytes += data.nbytes
            self._call(self._link.inner.provide, source.transfer, entry, data)
        self._forget_copy()

    def _forget_copy(self) -> None:
        super()._forget_copy()
        if self._source is not None:
            self._source = None
            self._left.clear()
            self._state.forget()
