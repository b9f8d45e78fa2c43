"""The learner's end of the channel: two DEALER connections, control and data.

One session, from connect to the first close of either connection; then it is closed and a new one
is made, so nothing stale is ever delivered. All calls but `wake` come from one thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

import zmq

from dd_lightning.protocol import messages
from dd_lightning.protocol.messages import Goodbye, Message
from dd_lightning.transport import frames
from dd_lightning.transport.address import Address
from dd_lightning.transport.curve import OVERHEAD_BYTES, about_keys, secure_dialer
from dd_lightning.transport.frames import CONTROL, DATA, Arrival, Buffer, Disconnected
from dd_lightning.transport.keys import DialKeys
from dd_lightning.transport.liveness import since_heard_s
from dd_lightning.transport.rendezvous import Rendezvous
from dd_lightning.transport.wiring import FAILED, Monitor, Waker, readable

MAX_BATCH = 64
GOODBYE_S = 0.5  # at most, for a goodbye to leave when the channel is closed
OWN_KEY = "DD_KEY or key= to this learner"
CONTROL_QUEUE = 1000  # messages
LOOK_S = 0.25  # how often it is looked whether the path is alive
STALL_S = 1.0  # not looked for so long: this process stood still, and the path may be alive
DATA_QUEUE = 2  # messages not yet polled (sent: one, by `can_upload`); this bounds memory

_EVENTS = (
    zmq.Event.CONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CLOSED
    | FAILED
)
_NAMES = {CONTROL: "control", DATA: "data"}


class ChannelError(ConnectionError):
    """The syncer's channel could not be reached; the text names the address and the cause."""


class KeyRefused(ChannelError, PermissionError):
    """The syncer does not let this learner's key in: trying again will not help."""


class ChannelTimeout(ChannelError, TimeoutError):
    """Nothing answered in time: the path is dead, or the machine there."""


class LearnerChannel:
    """Connects in at most `connect_timeout_s`; with `keys`, to the holder of the syncer's key only.

    Args:
        dial_timeout_s: bound on the TCP connections alone; None: none of their own.
        silence_s: a connected channel on which nothing has come for so long ends, since TCP itself
            would find a path that works again only up to twice the outage later. None: never.

    Raises:
        KeyRefused: the syncer has this learner's key not on its allow-list.
        ChannelTimeout: nothing answered in time.
        ChannelError: no connection came about for another reason.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        max_message_bytes: int,
        connect_timeout_s: float = 5.0,
        keys: DialKeys | None = None,
        dial_timeout_s: float | None = None,
        silence_s: Callable[[], float] | None = None,
    ) -> None:
        self.address = Address(rendezvous.host, rendezvous.channel_port)
        self.session = secrets.token_bytes(frames.TOKEN_BYTES).hex()
        self._max_message_bytes = max_message_bytes
        self._keys = keys
        self._about_keys = about_keys(keys, rendezvous.key_fingerprint, OWN_KEY)
        self._overhead = OVERHEAD_BYTES if keys is not None else 0
        self._context = zmq.Context()
        self._waker = Waker()
        self._sockets: dict[bytes, zmq.Socket] = {}
        self._monitors: dict[bytes, Monitor] = {}
        self._upload: zmq.MessageTracker | None = None
        self._ended: str | None = None
        self.was_silent = False  # what ended it
        self._silence_s = silence_s
        self._descriptors: dict[bytes, int] = {}
        self._looked_s = self._watched_s = time.monotonic()
        self._reported = False
        self._linger_s = 0.0
        self._up = self._down = 0
        self._closed = False
        self._poller = zmq.Poller()
        try:
            for role in (CONTROL, DATA):
                self._open(role)
            self._await_handshakes(connect_timeout_s, dial_timeout_s or connect_timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, role: bytes) -> None:
        socket = self._sockets[role] = self._context.socket(zmq.DEALER)
        frames.limit(socket, self.address.host, self._max_message_bytes, self._overhead)
        queue = CONTROL_QUEUE if role == CONTROL else DATA_QUEUE
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.RCVHWM, queue)
        socket.setsockopt(zmq.IDENTITY, frames.identity_of(role, self.session))
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, 0)  # bounded by _await_handshakes instead
        if role == CONTROL:
            # Only here: on data a heartbeat would wait behind a long payload and then cut it off.
            # The time to live makes the syncer watch this connection in the same way.
            socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * frames.HEARTBEAT_S))
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(1000 * frames.SILENCE_S))
            socket.setsockopt(zmq.HEARTBEAT_TTL, round(1000 * frames.SILENCE_S))
        if self._keys is not None:
            secure_dialer(socket, self._keys)
        monitor = self._monitors[role] = Monitor(self._context, socket, _EVENTS)
        socket.connect(str(self.address))
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor.socket, zmq.POLLIN)
        if role == DATA:
            self._poller.register(self._waker.reader, zmq.POLLIN)

    def _await_handshakes(self, timeout_s: float, dial_timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        dialled_by = time.monotonic() + min(timeout_s, dial_timeout_s)
        waiting = {monitor.socket: role for role, monitor in self._monitors.items()}
        connected: set[bytes] = set()
        poller = zmq.Poller()
        for socket in waiting:
            poller.register(socket, zmq.POLLIN)
        while waiting:
            stand = len(connected) == len(self._sockets)
            remaining = (deadline if stand else dialled_by) - time.monotonic()
            ready = poller.poll(1000 * remaining) if remaining > 0 else []
            if not ready:
                waited_s = timeout_s if stand else min(timeout_s, dial_timeout_s)
                cause = (
                    "the connection was accepted but no syncer answered"
                    if connected
                    else ("nothing answered")
                )
                raise ChannelTimeout(
                    f"{self.address}: {cause} within {waited_s:g} s.{self._about_keys}"
                )
            for socket, _ in ready:
                role = waiting[socket]
                for event, value in self._monitors[role].drain():
                    if event == zmq.Event.CONNECTED:
                        connected.add(role)
                        self._descriptors[role] = value
                    elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                        poller.unregister(socket)
                        del waiting[socket]
                        self._hello(role, deadline)
                    else:
                        raise self._greeting_failed(event, role in connected)

    def _greeting_failed(self, event: zmq.Event, connected: bool) -> ChannelError:
        if not connected:
            return ChannelError(f"{self.address}: the connection was refused ({event.name}).")
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH and self._keys is not None:
            return KeyRefused(
                f"{self.address}: the syncer does not let in the key of {self._keys.file} (public "
                f"key {self._keys.public.decode()}). Add it to the allow-list there: "
                "`dd-lightning keys add` in the folder of the run's keys."
            )
        return ChannelError(
            f"{self.address}: closed during the greeting: this is no syncer's channel, or not one "
            f"for this key ({event.name}).{self._about_keys}"
        )

    def _hello(self, role: bytes, deadline: float) -> None:
        socket = self._sockets[role]
        remaining = max(0.0, deadline - time.monotonic())
        if not socket.poll(1000 * remaining, zmq.POLLOUT):
            raise ChannelError(f"{self.address}: closed right after the greeting.")
        socket.send(frames.HELLO, zmq.NOBLOCK)
        self._up += frames.wire_size(0, overhead=self._overhead)

    def poll(self, timeout_s: float) -> list[Arrival | Disconnected]:
        """What has come, after at most `timeout_s`; empty at the timeout or when woken."""
        deadline = time.monotonic() + timeout_s
        while True:
            woken = self._waker.clear()
            events = self._collect()
            remaining = deadline - time.monotonic()
            if events or woken or remaining <= 0:
                return events
            self._poller.poll(1000 * (remaining if self._silence_s is None else LOOK_S))

    def _collect(self) -> list[Arrival | Disconnected]:
        events: list[Arrival | Disconnected] = []
        if self._reported:
            return events
        for role, monitor in self._monitors.items():
            for event, _value in monitor.drain():
                self._end(f"{_NAMES[role]} connection to {self.address}: {event.name.lower()}")
        self._look()
        drained = all([self._receive(role, events) for role in (CONTROL, DATA)])
        if self._ended is not None and drained:
            self._reported = True
            self._poller = zmq.Poller()  # nothing more to wait for but `wake`
            self._poller.register(self._waker.reader, zmq.POLLIN)
            events.append(Disconnected(self.session, self._ended))
        return events

    def _look(self) -> None:
        """Ends a channel whose path has been silent too long."""
        now = time.monotonic()
        since_s = now - self._looked_s
        if self._silence_s is None or since_s < LOOK_S / 2 or self._ended is not None:
            return
        self._looked_s = now
        if since_s > STALL_S:
            self._watched_s = now
        heard = [since_heard_s(fd) for fd in self._descriptors.values()]
        silent_s = min([now - self._watched_s, *(0.0 if one is None else one for one in heard)])
        if silent_s >= self._silence_s():
            self.was_silent = True
            self._end(f"nothing has come from {self.address} for {silent_s:.1f} s: a dead path")

    def _receive(self, role: bytes, events: list[Arrival | Disconnected]) -> bool:
        """Takes what has come over one connection; False if there may be more."""
        socket = self._sockets[role]
        for _ in range(MAX_BATCH):
            if not readable(socket):
                return True
            parts = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            size = frames.wire_size(*map(len, parts), overhead=self._overhead)
            self._down += size
            try:
                message, payload = frames.decode_frames(messages.decode_from_syncer, role, parts)
            except ValueError as error:
                self._end(f"{self.address} sent what no syncer of this version sends: {error}")
                return True
            events.append(Arrival(self.session, message, payload, size))
        return False

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason

    def send(self, message: Message, payload: Buffer | None = None) -> bool:
        """Never blocks; False when the connection is gone or full (try again after a poll).

        The payload is not copied: do not write to it before `can_upload()` is true again.
        """
        header = messages.encode(message)
        frames.check_outgoing(message, header, payload, self._max_message_bytes)
        if self._ended is not None or (payload is not None and not self.can_upload()):
            return False
        parts: list[bytes | zmq.Frame] = [header]
        tracker = None
        if payload is not None:
            frame = zmq.Frame(payload, track=True, copy=False, copy_threshold=0)
            tracker = frame.tracker
            parts.append(frame)
        socket = self._sockets[CONTROL if payload is None else DATA]
        try:
            socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return False
        if tracker is not None:
            self._upload = tracker
        self._linger_s = GOODBYE_S if isinstance(message, Goodbye) else 0.0
        self._up += frames.wire_size(*map(len, [header, *parts[1:]]), overhead=self._overhead)
        return True

    def can_upload(self) -> bool:
        """Whether the last payload has left this process, so that another may be sent."""
        if self._ended is not None or not (self._upload is None or self._upload.done):
            return False
        # asked so that the socket hears of the space that the last message has left
        return bool(self._sockets[DATA].getsockopt(zmq.EVENTS) & zmq.POLLOUT)

    def wire_bytes(self) -> tuple[int, int]:
        """(up, down) of this session, framing included."""
        return self._up, self._down

    def wake(self) -> None:
        """Makes `poll` return; thread-safe."""
        self._waker.wake()

    def close(self) -> None:
        """Drops what has not left, except after a `Goodbye`: it gets `GOODBYE_S` to leave."""
        if self._closed:
            return
        self._closed = True
        linger_s = 0.0 if self._ended is not None else self._linger_s
        self._ended = self._ended or "closed"
        for monitor in self._monitors.values():
            monitor.close()
        for socket in self._sockets.values():
            socket.close(linger=round(1000 * linger_s))
        self._context.term()
        self._waker.close()
