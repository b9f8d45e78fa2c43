"""Fragments on their way: a session takes one payload at a time, the rest waits here."""

from __future__ import annotations

from dd_lightning.protocol.messages import Fragment
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

    def put(self, session: str, message: Fragment, published: Encoded) -> None:
        """Send as soon as the session takes it."""
        self._waiting.setdefault(session, {})[message.fragment] = (message, published)
        self._flush(session)

    def flush(self) -> None:
        """Try again what waits."""
        for session in list(self._waiting):
            self._flush(session)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._waiting.pop(session, None)

    def _flush(self, session: str) -> None:
        waiting = self._waiting[session]
        for fragment, (message, published) in list(waiting.items()):
            if not self._channel.send(session, message, published.data):
                return
            del waiting[fragment]
        del self._waiting[session]
