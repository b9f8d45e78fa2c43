"""What is on its way: a session takes one payload at a time, the rest waits here.

Fragments go first, then pieces of a donor's state, of which the donor's window bounds the number.
"""

from __future__ import annotations

from collections import deque

from dd_lightning.protocol.messages import Fragment, StateChunk
from dd_lightning.syncer.payload import Encoded
from dd_lightning.transport.syncer_channel import SyncerChannel


class Outgoing:
    """Per session, the fragments that its connection has not taken yet, oldest first.

    Only the newest version of a fragment waits. The bytes are shared: what waits for several
    sessions is in memory once.
    """

    def __init__(self, channel: SyncerChannel) -> None:
        self._channel = channel
        self._waiting: dict[str, dict[int, tuple[Fragment, Encoded]]] = {}
        self._relayed: dict[str, deque[tuple[StateChunk, memoryview]]] = {}

    def put(self, session: str, message: Fragment, published: Encoded) -> None:
        """Send as soon as the session takes it."""
        self._waiting.setdefault(session, {})[message.fragment] = (message, published)
        self._flush(session)

    def relay(self, session: str, message: StateChunk, data: memoryview) -> None:
        """Send when no fragment waits for the session."""
        waiting = self._relayed.setdefault(session, deque())
        if waiting and waiting[0][0].transfer != message.transfer:
            waiting.clear()  # of a donor that was given up
        waiting.append((message, data))
        self._flush(session)

    def flush(self) -> None:
        """Try again what waits."""
        for session in {**self._waiting, **self._relayed}:
            self._flush(session)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._waiting.pop(session, None)
        self._relayed.pop(session, None)

    def _flush(self, session: str) -> None:
        waiting = self._waiting.get(session, {})
        for fragment, (message, published) in list(waiting.items()):
            if not self._channel.send(session, message, published.data):
                return
            del waiting[fragment]
        self._waiting.pop(session, None)
        chunks = self._relayed.get(session, deque())
        while chunks:
            if not self._channel.send(session, *chunks[0]):
                return
            chunks.popleft()
        self._relayed.pop(session, None)
