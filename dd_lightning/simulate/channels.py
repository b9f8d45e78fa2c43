"""The virtual channel: what `transport.SyncerChannel` and `LearnerChannel` are, in virtual time.

Bytes go the ways of `network/link.py`'s model (the proxy's): per session two flows in each
direction, control and data, which share their region's pipes. A connection that one end drops
closes at the other after the link's delay; what was sent before it still arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from dd_lightning.network.link import Direction, LinkModel, Path
from dd_lightning.network.profiles import WanProfile
from dd_lightning.protocol.messages import Message, encode
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.virtual_time import MESSAGES_FIRST, VirtualTime
from dd_lightning.transport.frames import CONTROL, DATA, Arrival, Disconnected, wire_size

ROUND_TRIPS_OF_A_DIAL = 3  # rendezvous (connect, ask) and channel, before the first message
ENDED_KEPT = 1024  # ended sessions whose byte counts are still known


class _Instant:
    """A path of no length, for `network=none`."""

    def send(self, now: float, num_bytes: int) -> float:
        del num_bytes
        return now


@dataclass(slots=True)
class Session:
    """Both ends of one connection."""

    name: str
    learner: int
    paths: dict[tuple[Direction, bytes], Path | _Instant]
    one_way_s: float
    to_learner: Callable[[Any], None]
    up: int = 0
    down: int = 0
    open_at_syncer: bool = False
    open_at_learner: bool = True
    busy_until: dict[Direction, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})

    def arrival(self, now: float, way: Direction, role: bytes, num_bytes: int) -> float:
        """When so many bytes, sent now, are at the other end."""
        arrives = self.paths[way, role].send(now, num_bytes)
        if role == DATA:
            self.busy_until[way] = max(now, arrives - self.one_way_s)
        return arrives


class VirtualNetwork:
    """Connects learners with whatever syncer listens (`syncer`, None while it is away)."""

    def __init__(self, time: VirtualTime, profile: WanProfile, seed: int) -> None:
        self.time = time
        self.syncer: VirtualSyncerChannel | None = None
        self._profile = profile
        self._model = LinkModel(profile, seed) if profile.needs_proxy else None
        self._names = count(1)

    def dial(
        self,
        learner: int,
        to_learner: Callable[[Any], None],
        done: Callable[[Session | None], None],
    ) -> None:
        """Try to connect; `done` gets the session, or None where nobody listens."""
        session = self._session(learner, to_learner)
        at = self.time.now
        for _ in range(ROUND_TRIPS_OF_A_DIAL):
            at = session.paths["up", CONTROL].send(at, 0)
            at = session.paths["down", CONTROL].send(at, 0)

        def connected() -> None:
            if self.syncer is None:
                done(None)
                return
            self.syncer.accept(session)
            done(session)

        self.time.at(at, connected, MESSAGES_FIRST)

    def _session(self, learner: int, to_learner: Callable[[Any], None]) -> Session:
        paths: dict[tuple[Direction, bytes], Path | _Instant] = {}
        one_way_s = 0.0
        region = self._profile.region_of(learner)
        for way in ("up", "down"):
            for role in (CONTROL, DATA):
                paths[way, role] = (
                    _Instant() if self._model is None else self._model.path(region, way)
                )
        if self._model is not None:
            one_way_s = self._profile.link(region).rtt_ms / 2e3
        return Session(f"{next(self._names):032x}", learner, paths, one_way_s, to_learner)

    def close_at_learner(self, session: Session) -> None:
        """The learner drops it (or is dead): the syncer hears of it after the link's delay."""
        if not session.open_at_learner:
            return
        session.open_at_learner = False
        arrives = max(
            session.arrival(self.time.now, "up", CONTROL, 0),
            session.paths["up", DATA].send(self.time.now, 0),
        )
        self.time.at(arrives, lambda: self._closed_at_syncer(session))

    def _closed_at_syncer(self, session: Session) -> None:
        if self.syncer is not None:
            self.syncer.lost(session, "connection closed by the learner")


class VirtualLearnerChannel:
    """A learner's end, as its comm thread uses it."""

    def __init__(self, network: VirtualNetwork, session: Session) -> None:
        self._network, self._session = network, session

    def send(self, message: Message, payload: Any = None) -> bool:
        """Put it on its way; False when the connection is gone, or busy with a payload."""
        session, time = self._session, self._network.time
        if not session.open_at_learner or (payload is not None and not self.can_upload()):
            return False
        num_bytes = wire_size(
            len(encode(message)), *([len(payload)] if payload is not None else [])
        )
        role = CONTROL if payload is None else DATA
        arrives = session.arrival(time.now, "up", role, num_bytes)

        def arrived() -> None:
            if self._network.syncer is not None:
                self._network.syncer.arrived(session, message, payload, num_bytes)

        time.at(arrives, arrived)
        return True

    def can_upload(self) -> bool:
        """Whether the last payload has left."""
        return self._network.time.now >= self._session.busy_until["up"]

    @property
    def free_at(self) -> float:
        """When `can_upload` will be true."""
        return self._session.busy_until["up"]

    def poll(self, timeout_s: float) -> list[Any]:
        """Nothing: messages are handed over as they arrive."""
        del timeout_s
        return []

    def wake(self) -> None:
        """Nobody waits in `poll`."""

    def close(self) -> None:
        """Drop the connection."""
        self._network.close_at_learner(self._session)


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

    def arrived(self, session: Session, message: Message, payload: Any, num_bytes: int) -> None:
        """A message is here."""
        if not session.open_at_syncer or session.name not in self._sessions:
            return
        session.up += num_bytes
        self._events.append(Arrival(session.name, message, payload, num_bytes))
        self.wake()

    def lost(self, session: Session, reason: str) -> None:
        """The learner's end is gone."""
        if self._end(session):
            self._events.append(Disconnected(session.name, reason))
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
        if payload is not None and self._time.now < state.busy_until["down"]:
            self._time.at(state.busy_until["down"], self.wake)
            return False
        num_bytes = wire_size(
            len(encode(message)), *([len(payload)] if payload is not None else [])
        )
        role = CONTROL if payload is None else DATA
        state.down += num_bytes
        arrives = state.arrival(self._time.now, "down", role, num_bytes)
        event = Arrival(session, message, payload, num_bytes)
        self._time.at(arrives, lambda: self._deliver(state, event))
        return True

    @staticmethod
    def _deliver(session: Session, event: Any) -> None:
        if session.open_at_learner:
            session.to_learner(event)

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
            self._close_at_learner(state)

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
            self._close_at_learner(state)

    def _end(self, session: Session) -> bool:
        session.open_at_syncer = False
        if self._sessions.pop(session.name, None) is None:
            return False
        self._ended[session.name] = session
        while len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]
        return True

    def _close_at_learner(self, session: Session) -> None:
        arrives = max(
            session.arrival(self._time.now, "down", CONTROL, 0),
            session.paths["down", DATA].send(self._time.now, 0),
        )
        event = Disconnected(session.name, "connection closed by the syncer")

        def closed() -> None:
            if session.open_at_learner:
                session.open_at_learner = False
                session.to_learner(event)

        self._time.at(arrives, closed)


def _size(message: Message, payload: Any) -> int:
    """Bytes on the wire, framing included."""
    header = len(encode(message))
    return wire_size(header) if payload is None else wire_size(header, memoryview(payload).nbytes)
