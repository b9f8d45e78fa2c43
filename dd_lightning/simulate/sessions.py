"""One connection of the virtual channel, both ends: its flows, its signs of life, its end.

What a failure loses: a message that had not left when its sender closed or died; what arrives at an
end that is closed. In a cut nothing is lost by the link: it comes late, if anybody is there to take
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dd_lightning.network.control import PathFaults
from dd_lightning.network.link import Direction
from dd_lightning.protocol.messages import Message, encode
from dd_lightning.simulate.corruption import Broken, come_through
from dd_lightning.simulate.flows import MessageFlow
from dd_lightning.simulate.virtual_time import Action, VirtualTime
from dd_lightning.transport.frames import (
    CONTROL,
    DATA,
    HEARTBEAT_S,
    SILENCE_S,
    Arrival,
    Disconnected,
    wire_size,
)

PING_BYTES, PONG_BYTES = 9, 7  # ZeroMQ's commands, framing included
ROLES = (CONTROL, DATA)


class SyncerEnd(Protocol):
    """What a session needs of the syncer's channel."""

    def arrived(self, session: Session, event: Arrival) -> None:
        """A message is here."""

    def broken(self, session: Session, reason: str) -> None:
        """Bytes are here that are no message."""

    def lost(self, session: Session, reason: str) -> None:
        """The learner's end is gone, or silent for too long."""


@dataclass(slots=True, eq=False)
class Session:
    """Both ends of one connection.

    Args:
        syncer: whose the other end is; a later syncer knows nothing of it.
        one_way_s: of its link, undisturbed.
        patience_s: a learner that hears nothing for so long ends it; None: nothing can fall
            silent here, and no heartbeat is sent.
    """

    name: str
    learner: int
    time: VirtualTime
    syncer: SyncerEnd
    to_learner: Callable[[Any], None]
    one_way_s: float = 0.0
    patience_s: Callable[[], float] | None = None
    faults: PathFaults | None = None
    flows: dict[tuple[Direction, bytes], MessageFlow] = field(default_factory=dict)
    up: int = 0
    down: int = 0
    open_at_syncer: bool = False
    open_at_learner: bool = True
    was_silent: bool = False  # what ended it
    handshake_s: float = 0.0  # it took so long
    heard_s: float = 0.0  # by the learner
    control_heard_s: float = 0.0  # by the syncer
    stopped_s: float | None = None  # since when the learner's process stands still

    # ------------------------------------------------------------------ signs of life

    def begin(self) -> None:
        """It stands at both ends: its heartbeats begin."""
        self.heard_s = self.control_heard_s = self.time.now
        if self.patience_s is not None:
            self._ping()
            self._watch_syncer()
            self._watch_learner()

    def heard(self, way: Direction, role: bytes) -> None:
        """Bytes have come through; what the syncer gets is acknowledged."""
        now = self.time.now
        self.heard_s = max(self.heard_s, now + (self.one_way_s if way == "up" else 0.0))
        if way == "up" and role == CONTROL:
            self.control_heard_s = now

    def stop(self) -> None:
        """The learner's process is stopped: no sign of life, nor any patience, until `go_on`."""
        self.stopped_s = since_s = self.time.now

        def silent() -> None:  # without heartbeats nobody else watches
            if self.stopped_s == since_s and self.open_at_syncer:
                self._lose_learner()

        if self.patience_s is None:
            self.time.at(since_s + SILENCE_S, silent)

    def go_on(self) -> None:
        """It reads what has come meanwhile before it looks at any clock."""
        self.stopped_s, self.heard_s = None, self.time.now

    def _ping(self) -> None:
        if not self.open_at_learner:
            return
        if self.stopped_s is None:
            self.flows["up", CONTROL].send(PING_BYTES, self._pong)
        self.time.at(self.time.now + HEARTBEAT_S, self._ping)

    def _pong(self) -> None:
        if self.open_at_syncer:
            self.flows["down", CONTROL].send(PONG_BYTES, lambda: None)

    def _watch_syncer(self) -> None:
        """The learner's side of it."""
        assert self.patience_s is not None  # else nobody watches
        if not self.open_at_learner:
            return
        patience_s = self.patience_s()
        since_s = self.heard_s if self.stopped_s is None else self.time.now
        due_s = since_s + patience_s
        if self.time.now < due_s:
            self.time.at(due_s, self._watch_syncer)
            return
        self.was_silent = True
        self.close_at_learner()
        reason = f"nothing has come for {patience_s:.1f} s: a dead path"
        self.to_learner(Disconnected(self.name, reason))

    def _watch_learner(self) -> None:
        """The syncer's side of it."""
        if not self.open_at_syncer:
            return
        due_s = self.control_heard_s + SILENCE_S
        if self.time.now < due_s:
            self.time.at(due_s, self._watch_learner)
            return
        self._lose_learner()

    def _lose_learner(self) -> None:
        self.syncer.lost(self, f"nothing has come for {SILENCE_S:g} s")
        self.close_at_syncer("connection closed by the syncer")

    # ------------------------------------------------------------------ messages

    def is_free(self, way: Direction) -> bool:
        """Whether the last payload has left."""
        return self.flows[way, DATA].is_free

    def when_free(self, way: Direction, action: Action) -> None:
        """Call it once, when the last payload has left."""
        self.flows[way, DATA].when_free(action)

    def send(self, way: Direction, message: Message, payload: Any = None) -> int:
        """Put it on its way; returns its bytes on the wire, framing included."""
        header = encode(message)
        sizes = [len(header)] if payload is None else [len(header), memoryview(payload).nbytes]
        num_bytes = wire_size(*sizes)
        role = CONTROL if payload is None else DATA
        comes: Arrival | Broken = Arrival(self.name, message, payload, num_bytes)
        if self.faults is not None and self.faults.is_corrupt(self.time.now):
            comes = come_through(self.faults, self.time.now, way, header, comes)
        self.flows[way, role].send(num_bytes, lambda: self._deliver(way, comes))
        return num_bytes

    def _deliver(self, way: Direction, comes: Arrival | Broken) -> None:
        if way == "up":
            if isinstance(comes, Broken):
                self.syncer.broken(self, comes.reason)
            else:
                self.syncer.arrived(self, comes)
        elif self.open_at_learner:
            if isinstance(comes, Broken):
                self.close_at_learner()
                self.to_learner(Disconnected(self.name, comes.reason))
            else:
                self.to_learner(comes)

    # ------------------------------------------------------------------ the end

    def close_at_learner(self) -> None:
        """The learner drops it (or is dead): the syncer hears of it after what was sent before."""
        if self.open_at_learner:
            self.open_at_learner = False
            self.flows["up", DATA].drop_unsent()
            self._send_close(
                "up", lambda: self.syncer.lost(self, "connection closed by the learner")
            )

    def close_at_syncer(self, reason: str) -> None:
        """The syncer drops it (or is dead): the learner hears of it after what was sent before."""
        self.open_at_syncer = False
        self.flows["down", DATA].drop_unsent()

        def closed() -> None:
            if self.open_at_learner:
                self.open_at_learner = False
                self.to_learner(Disconnected(self.name, reason))

        self._send_close("down", closed)

    def _send_close(self, way: Direction, closed: Callable[[], None]) -> None:
        """Over both connections; each brings what was sent before it, the later one is the end."""
        left = set(ROLES)

        def one(role: bytes) -> None:
            left.discard(role)
            if not left:
                closed()

        for role in ROLES:
            self.flows[way, role].send(0, lambda role=role: one(role))
