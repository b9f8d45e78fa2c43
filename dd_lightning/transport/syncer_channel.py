"""The syncer's end of the channel: one ROUTER socket, two connections per learner session.

Decides which session a message belongs to and when a session has ended; not what a message means.
All calls but `wake` come from one thread. Nothing here blocks except `poll`, for its timeout.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

import zmq

from dd_lightning.protocol import messages
from dd_lightning.protocol.messages import Corrupt, Message
from dd_lightning.transport import frames
from dd_lightning.transport.address import Address, require_loopback
from dd_lightning.transport.connections import Connection, Connections, shut_down
from dd_lightning.transport.curve import OVERHEAD_BYTES, Gate, secure_listener
from dd_lightning.transport.frames import (
    CONTROL,
    DATA,
    Arrival,
    Buffer,
    Disconnected,
    Malformed,
)
from dd_lightning.transport.keys import SyncerKeys
from dd_lightning.transport.strangers import NOBODY, Standing, Strangers
from dd_lightning.transport.wiring import FAILED, OTHER_MECHANISM, WRONG_KEY, Monitor, Waker

MOST_FRAMES = 4  # kept of a message: identity, two, and one too many
MOST_ODD = 20  # messages of one session
MAX_BATCH = 256  # messages per poll
SEND_QUEUE = 256  # control messages per connection; payloads: one per session
RECEIVE_QUEUE = 32  # messages per connection not yet polled
ENDED_KEPT = 1024  # ended sessions whose byte counts are still known
CLOSE_S = 0.2  # between `close_session` and the close, for what was just sent to leave
RETRY_S = 0.002  # how often a payload on its way is looked at while a send waits for it

Event = Arrival | Disconnected | Malformed


@dataclass(slots=True)
class _Session:
    connections: dict[bytes, Connection] = field(default_factory=dict)
    peer: str = ""  # host it comes from
    up: int = 0
    down: int = 0
    payload: zmq.MessageTracker | None = None
    heard: bool = False  # a well-formed message
    trusted: bool = False  # let into the run
    odd: int = 0  # messages that are none of ours
    refused: set[bytes] = field(default_factory=set)  # connections a send was refused on


class SyncerChannel:
    """Listens at once; with `keys`, only to who holds a key of the allow-list.

    Raises ValueError if the port is taken, or open to others without keys (`insecure` allows it).
    """

    def __init__(
        self,
        host: str,
        port: int = 0,
        *,
        max_message_bytes: int,
        insecure: bool = False,
        keys: SyncerKeys | None = None,
    ) -> None:
        require_loopback(host, insecure or keys is not None)
        self._max_message_bytes = max_message_bytes
        self._overhead = OVERHEAD_BYTES if keys is not None else 0
        self._connections = Connections()
        self._strangers = Strangers(self._connections, max_message_bytes)
        self._sessions: dict[str, _Session] = {}
        self._ended: OrderedDict[str, _Session] = OrderedDict()
        self._dying: dict[str, str] = {}  # session -> reason, until its last frames are read
        self._closing: list[tuple[float, Connection]] = []  # (when, what) to close
        self._closed = False
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        frames.limit(self._router, host, max_message_bytes, self._overhead)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        self._router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        watched = zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | FAILED
        self._monitor = Monitor(self._context, self._router, watched)
        self._waker = Waker()
        self._gate = Gate(self._context, keys) if keys is not None else None
        self._poller = zmq.Poller()
        for source in (self._router, self._monitor.socket, self._waker.reader):
            self._poller.register(source, zmq.POLLIN)
        if keys is not None and self._gate is not None:
            self._poller.register(self._gate.socket, zmq.POLLIN)
            secure_listener(self._router, keys)
        try:
            self._router.bind(str(Address(host, port)))
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(
                f"The channel cannot listen on {host} port {port}: {error}. Give a free port, or "
                "0 for any."
            ) from None
        endpoint = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rsplit(":", 1)[1])

    # ------------------------------------------------------------------------- receiving

    def poll(self, timeout_s: float) -> list[Event]:
        """What has come, after at most `timeout_s`.

        Returns early, perhaps with nothing, when woken and when a session that a send was refused
        for takes a message again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            early = self._waker.clear()
            events = self._collect()
            waiting = [s for s in self._sessions.values() if s.refused]
            for session in waiting:
                early |= self._takes_again(session)
            remaining = deadline - time.monotonic()
            if events or early or remaining <= 0:
                return events
            if waiting:
                remaining = min(RETRY_S, remaining)
            if self._closing:
                remaining = min(CLOSE_S, remaining)
            self._poller.poll(1000 * remaining)

    def _takes_again(self, session: _Session) -> bool:
        takes = {
            role
            for role in session.refused
            if role in session.connections and (role == CONTROL or _sent(session.payload))
        }
        session.refused -= takes
        return bool(takes)

    def _collect(self) -> list[Event]:
        events: list[Event] = []
        if self._gate is not None:
            self._gate.answer()
        self._watch()
        self._shut_due()
        for _ in range(MAX_BATCH):
            parts = self._read()
            if parts is None:
                break
            event = self._received(parts)
            if event is not None:
                events.append(event)
        else:
            self._sweep(events, drained=False)
            return events  # more frames wait; no session ends before its last frame is read
        self._sweep(events, drained=True)
        for session, reason in list(self._dying.items()):
            self._end(session)
            events.append(Disconnected(session, reason))
        for connection in self._connections.take_unnamed():
            events.append(Malformed(connection.peer, self._why_closed(connection)))
        return events

    def _why_closed(self, connection: Connection) -> str:
        """Of a connection that closed before its first frame."""
        if connection.verdict:
            return connection.verdict
        if connection.fault == WRONG_KEY:
            return "it dials with another syncer's public key"
        if connection.fault == OTHER_MECHANISM:
            mine = "it has no key" if self._gate is not None else "it has a key, this syncer none"
            return f"{mine} (--key, DD_KEY)"
        if connection.fault:
            return f"its handshake is none (ZeroMQ's error {connection.fault:#x})"
        if self._gate is None:
            return "closed without a word of this protocol"
        said = self._gate.refusal(connection.peer.rpartition(":")[0])
        return said or "closed in the handshake, as a learner without a key does"

    def _read(self) -> list[zmq.Frame] | None:
        """The frames of one message, of one with too many only as many as show that it has."""
        try:
            parts = [self._router.recv(zmq.NOBLOCK, copy=False)]
        except zmq.Again:
            return None
        while parts[-1].more:
            part = self._router.recv(copy=False)  # they come together
            parts[MOST_FRAMES:] = [part]
        return parts

    def _sweep(self, events: list[Event], *, drained: bool) -> None:
        """Closes connections that cost too much (`strangers.py`)."""
        for connection in self._strangers.sweep(time.monotonic(), drained, self._standing):
            shut_down(connection)
            if connection.identity is not None and not connection.told:
                events.append(Malformed(connection.peer, connection.verdict))
            connection.told = True

    def _standing(self, identity: bytes | None) -> Standing:
        named = frames.split_identity(identity or b"")
        session = self._sessions.get(named[1]) if named is not None else None
        return NOBODY if session is None else Standing(session.heard, session.trusted)

    def _watch(self) -> None:
        for connection in self._connections.feed(self._monitor.drain()):
            named = frames.split_identity(connection.identity or b"")
            if named is not None and named[1] in self._sessions:
                role = "control" if named[0] == CONTROL else "data"
                self._dying.setdefault(named[1], f"{role} connection closed by {connection.peer}")

    def _received(self, parts: list[zmq.Frame]) -> Event | None:
        identity, body = parts[0].bytes, parts[1:]
        named = frames.split_identity(identity)
        if named is None:
            return self._stranger(identity, parts)
        role, name = named
        session = self._sessions.get(name)
        if session is None or role not in session.connections:
            session = self._bind(identity, _descriptor(parts))
            if session is None:
                return None
        size = frames.wire_size(*map(len, body), overhead=self._overhead)
        session.up += size
        connection = session.connections[role]
        connection.taken, connection.read = connection.taken + size, True
        if len(body) == 1 and len(body[0]) == len(frames.HELLO):
            session.peer = session.peer or str(body[0].get("Peer-Address"))
            return None
        try:
            message, payload = frames.decode_frames(messages.decode_at_syncer, role, body)
        except Corrupt as error:
            # Where the next message begins may be wrong too: a reconnect costs nothing, a stream
            # read from its middle would swallow what is sent for as long as it lives.
            self._dying.setdefault(name, str(error))
            return Malformed(session.peer or name, str(error))
        except ValueError as error:
            self.odd(name)
            return Malformed(session.peer or name, str(error))
        session.heard = True
        return Arrival(name, message, payload, size)

    def _stranger(self, identity: bytes, parts: list[zmq.Frame]) -> Malformed:
        self._watch()
        connection = self._connections.bind(identity, _descriptor(parts))
        if connection is not None:
            shut_down(connection)
        peer = connection.peer if connection is not None else "a stranger"
        return Malformed(peer, f"an identity of {len(identity)} bytes: no learner of this version")

    def _bind(self, identity: bytes, fd: int) -> _Session | None:
        """Binds a connection to its session; None if the session has ended."""
        self._watch()  # first, or a descriptor used again would name the connection before
        connection = self._connections.bind(identity, fd)
        role, name = identity[:1], identity[1:].hex()
        if connection is None or name in self._ended:
            if connection is not None:
                shut_down(connection)
            return None
        session = self._sessions.setdefault(name, _Session())
        session.connections[role] = connection
        if connection.closed:
            self._dying.setdefault(name, f"connection closed by {connection.peer}")
        return session

    def _end(self, name: str) -> None:
        """Half a session is none: closes what is left of it and remembers only its counts."""
        self._dying.pop(name, None)
        session = self._sessions.pop(name)
        due = time.monotonic() + CLOSE_S
        self._closing += [(due, connection) for connection in session.connections.values()]
        session.connections = {}
        session.payload = None
        self._ended[name] = session
        if len(self._ended) > ENDED_KEPT:
            self._ended.popitem(last=False)

    def _shut_due(self) -> None:
        now = time.monotonic()
        for due, connection in self._closing:
            if due <= now:
                shut_down(connection)
        self._closing = [
            (due, connection)
            for due, connection in self._closing
            if due > now and not connection.closed
        ]

    # --------------------------------------------------------------------------- sending

    def send(self, session: str, message: Message, payload: Buffer | None = None) -> bool:
        """Never blocks; False when the session has ended or takes no more now.

        One payload at a time per session: the next one is taken when the last has left this
        process. It is not copied: do not write to it afterwards.
        """
        header = messages.encode(message)
        frames.check_outgoing(message, header, payload, self._max_message_bytes)
        state = self._sessions.get(session)
        if state is None:
            return False
        role = CONTROL if payload is None else DATA
        if role not in state.connections or (role == DATA and not _sent(state.payload)):
            state.refused.add(role)
            return False
        parts: list[bytes | zmq.Frame] = [frames.identity_of(role, session), header]
        tracker = None
        if payload is not None:
            frame = zmq.Frame(payload, track=True, copy=False, copy_threshold=0)
            tracker = frame.tracker
            parts.append(frame)
        try:
            self._router.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        if tracker is not None:
            state.payload = tracker
        state.down += frames.wire_size(*map(len, parts[1:]), overhead=self._overhead)
        return True

    # --------------------------------------------------------------------------- the rest

    def trust(self, session: str) -> None:
        """It was let into the run: it may send payloads."""
        if session in self._sessions:
            self._sessions[session].trusted = True

    def odd(self, session: str) -> None:
        """It has sent what no learner sends; after `MOST_ODD` of these it is closed."""
        state = self._sessions.get(session)
        if state is not None:
            state.odd += 1
            if state.odd >= MOST_ODD:
                self._dying.setdefault(session, f"{MOST_ODD} messages that are none of ours")

    def _known(self, session: str) -> _Session:
        state = self._sessions.get(session) or self._ended.get(session)
        if state is None:
            raise KeyError(f"no session {session} (the last {ENDED_KEPT} ended ones are kept)")
        return state

    def peer_address(self, session: str) -> str:
        """The host the session's connections come from."""
        return self._known(session).peer

    def wire_bytes(self, session: str) -> tuple[int, int]:
        """(up, down) of a session, ended ones too, framing included."""
        state = self._known(session)
        return state.up, state.down

    def close_session(self, session: str) -> None:
        """Takes no more from it, and closes its connections `CLOSE_S` later (what was just sent to
        it gets there first). No `Disconnected` follows here."""
        self._watch()
        if session in self._sessions:
            self._end(session)

    def wake(self) -> None:
        """Makes `poll` return; thread-safe."""
        self._waker.wake()

    def close(self, linger_s: float = 0.0) -> None:
        """Waits at most `linger_s` for what was sent to leave; the rest is lost."""
        if self._closed:
            return
        self._closed = True
        self._monitor.close()
        self._router.close(linger=round(1000 * linger_s))
        if self._gate is not None:
            self._gate.close()
        self._context.term()
        self._waker.close()


def _sent(tracker: zmq.MessageTracker | None) -> bool:
    return tracker is None or tracker.done


def _descriptor(parts: list[zmq.Frame]) -> int:
    """File descriptor that the frames came over; -1 where the library does not tell."""
    for part in reversed(parts):
        try:
            return part.get(zmq.SRCFD)
        except zmq.ZMQError:
            continue  # frames of peers that speak ZMTP 1.0 come without
    return -1
