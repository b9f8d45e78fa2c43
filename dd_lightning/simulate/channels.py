"""The virtual channel: what `transport.SyncerChannel` and `LearnerChannel` are, in virtual time.

Bytes go the ways of `network/link.py`'s model (the proxy's): per session two flows in each
direction, control and data, which share their region's pipes (`network.py`, `sessions.py`).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dd_lightning.protocol.messages import Message
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.sessions import Session
from dd_lightning.simulate.virtual_time import Action
from dd_lightning.transport.frames import Arrival, Disconnected, Malformed

CLOSED = "connection closed by the syncer"
ENDED_KEPT = 1024  # ended sessions whose byte counts are still known


class VirtualLearnerChannel:
    """A learner's end, as its comm thread uses it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @property
    def was_silent(self) -> bool:
        """Whether silence ended it."""
        return self._session.was_silent

    def send(self, message: Message, payload: Any = None) -> bool:
        """Put it on its way; False when the connection is gone, or busy with a payload."""
        session = self._session
        if not session.open_at_learner or (payload is not None and not self.can_upload()):
            return False
        session.send("up", message, payload)
        return True

    def can_upload(self) -> bool:
        """Whether the last payload has left."""
        return self._session.open_at_learner and self._session.is_free("up")

    def when_free(self, action: Action) -> None:
        """Call it once, when the last payload has left."""
        self._session.when_free("up", action)

    def poll(self, timeout_s: float) -> list[Any]:
        """Nothing: messages are handed over as they arrive."""
        del timeout_s
        return []

    def wake(self) -> None:
        """Nobody waits in `poll`."""

    def close(self) -> None:
        """Drop the connection."""
        self._session.close_at_learner()


class VirtualSyncerChannel:
    """The syncer's end; `poll` parks the server's actor."""

    port = 0

    def __init__(self, network: VirtualNetwork) -> None:
        self.actor: Actor | None = None  # the server's; set before its first turn
        self._network, self._time = network, network.time
        self._sessions: dict[str, Session] = {}
        self._ended: dict[str, Session] = {}
        self._events: deque[Any] = deque()
        network.syncer = self

    # ------------------------------------------------------------------ from the network

    def accept(self, session: Session) -> None:
        """A learner has connected."""
        session.open_at_syncer = True
        self._sessions[session.name] = session

    def arrived(self, session: Session, event: Arrival) -> None:
        """A message is here."""
        if session.open_at_syncer:
            session.up += event.num_bytes
            self._tell(event)

    def broken(self, session: Session, reason: str) -> None:
        """Bytes are here that are no message: that ends the connection."""
        if session.open_at_syncer:
            self._tell(Malformed(self.peer_address(session.name), reason))
            self.lost(session, reason)
            session.close_at_syncer(CLOSED)

    def lost(self, session: Session, reason: str) -> None:
        """The learner's end is gone."""
        if self._end(session):
            self._tell(Disconnected(session.name, reason))

    def _tell(self, event: Any) -> None:
        self._events.append(event)
        self.wake()

    # ------------------------------------------------------------------ as SyncerChannel

    def poll(self, timeout_s: float) -> list[Any]:
        """What has come, after at most so long in virtual time."""
        assert self.actor is not None  # set before its first turn
        if not self._events:
            self.actor.park(self._time.now + timeout_s)
        events = list(self._events)
        self._events.clear()
        return events

    def send(self, session: str, message: Message, payload: Any = None) -> bool:
        """Put it on its way; one payload at a time per session."""
        state = self._sessions.get(session)
        if state is None:
            return False
        if payload is not None and not state.is_free("down"):
            state.when_free("down", self.wake)
            return False
        state.down += state.send("down", message, payload)
        return True

    def trust(self, session: str) -> None:
        """Nobody is a stranger here."""

    def odd(self, session: str) -> None:
        """Nor does anybody send what no learner sends."""

    def peer_address(self, session: str) -> str:
        """The learner's proxy address, as on a real machine."""
        return f"127.0.1.{self._known(session).learner + 1}"

    def wire_bytes(self, session: str) -> tuple[int, int]:
        """(up, down) of a session, ended ones too."""
        state = self._known(session)
        return state.up, state.down

    def _known(self, session: str) -> Session:
        state = self._sessions.get(session) or self._ended.get(session)
        if state is None:
            raise KeyError(f"no session {session}")
        return state

    def close_session(self, session: str) -> None:
        """Take no more from it and close it at the other end."""
        if session in self._sessions:
            state = self._sessions[session]
            self._end(state)
            state.close_at_syncer(CLOSED)

    def wake(self) -> None:
        """Let the server look at this instant."""
        if self.actor is not None and not self.actor.ended:
            self.actor.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """The syncer is gone: every learner hears of it after its link's delay."""
        del linger_s
        if self._network.syncer is self:
            self._network.syncer = None
        for state in list(self._sessions.values()):
            self._end(state)
            state.close_at_syncer(CLOSED)

    def _end(self, session: Session) -> bool:
        session.open_at_syncer = False
        if self._sessions.pop(session.name, None) is None:
            return False
        self._ended[session.name] = session
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        return True
