"""One proxied connection: two sockets, and a flow of shaped bytes in each direction.

Back-pressure is real in both: a side is not read while its flow is full, and a flow keeps what the
other side's socket does not take. Closes and resets travel as bytes do.
"""

import asyncio
import select
import socket
import struct
from collections.abc import Callable

from dd_lightning.network.lane import MAX_CHUNK_BYTES, Flow, Lane
from dd_lightning.network.link import Direction
from dd_lightning.network.pump import Pump

Alter = Callable[[bytes, float], bytes]
SOCKET_BUFFER_BYTES = 256 * 1024  # kernel's share per socket and direction (Linux doubles it)


def bound_buffers(sock: socket.socket) -> None:
    """Fix the kernel's buffers, which would grow to 32 MiB and hide the back-pressure."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)


class Side(asyncio.BufferedProtocol):
    """One socket of a connection; `flow` carries what is read here to the other side.

    Args:
        wait: do not read before `open()` (the learner's side, until the handshake is over).
        on_bytes: told how many bytes have been handed over to the other side.
        alter: what comes through of the bytes read here at a time (s, of the pump).
    """

    def __init__(
        self,
        pump: Pump,
        lane: Lane,
        flow: Flow,
        wait: bool,
        on_bytes: Callable[[int], None],
        alter: Alter,
    ) -> None:
        self.flow = flow
        self._alter = alter
        self.done = False  # the close has been handed over
        self._pump = pump
        self._lane = lane
        self._wait = wait
        self._on_bytes = on_bytes
        self._buffer = memoryview(bytearray(MAX_CHUNK_BYTES))
        self._transport: asyncio.Transport | None = None
        self._gone = self._reset = self._closed = False
        self._full = False  # this side's socket takes no more
        self._connection: Connection | None = None

    def attach(self, connection: "Connection") -> None:
        """Tell the side whose it is."""
        self._connection = connection
        self.flow.hand_over = self._hand_over

    def open(self) -> None:
        """Begin to read."""
        self._wait = False
        self._adjust_reading()

    def abort(self) -> None:
        """Drop the socket; its other end sees a reset, which a mere close would not be."""
        if self._transport is not None and not self._gone:
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def hung_up(self) -> bool:
        """Whether the other end has closed, though it is not read yet; False where the system
        cannot tell without reading."""
        if self._gone or self._transport is None:
            return True
        if not hasattr(select, "POLLRDHUP"):
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def finish(self) -> None:
        """Close the socket once what was written has left."""
        if self._transport is not None:
            self._transport.close()

    # asyncio calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=MAX_CHUNK_BYTES)
        self._adjust_reading()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[: min(len(self._buffer), self.flow.room())]

    def buffer_updated(self, nbytes: int) -> None:
        data = self._alter(bytes(self._buffer[:nbytes]), self._pump.now())
        self._pump.push(self._lane, self.flow, data)
        self._adjust_reading()

    def eof_received(self) -> bool:
        self._push_close()
        return True  # half open: the other direction goes on

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        assert self._connection is not None
        if self._connection.over:
            return
        if exc is not None or not self._closed:
            self._reset = True
            self._push_close()
        # the other flow goes on and drops what it brings here

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        assert self._connection is not None
        self._pump.expect(self._connection.other(self).flow)

    # The other side's flow ends here.

    def _push_close(self) -> None:
        self._closed = True
        self._pump.push(self._lane, self.flow, b"")

    def _adjust_reading(self) -> None:
        """Read only what the flow has room for (a chunk at least, to read in good portions)."""
        if self._transport is None or self._gone or self._closed or self._transport.is_closing():
            return
        if self._wait or self.flow.room() < self.flow.chunk:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _hand_over(self) -> bool:
        """Write to the other side what has arrived; false while its socket takes no more."""
        assert self._connection is not None
        other = self._connection.other(self)
        now = self._pump.now()
        while not other._full:
            data = self.flow.pop_arrived(now)
            if data is None:
                self._adjust_reading()
                return True
            if not data:
                self.done = True
                self._connection.close_arrived(self, self._reset)
            elif not (other._gone or other._transport is None or other._transport.is_closing()):
                other._transport.write(data)
                self._on_bytes(len(data))
        self._adjust_reading()
        return False

    def end_writing(self) -> None:
        """The other end has closed: nothing more will be written here."""
        if self._transport is not None and not self._gone and not self._transport.is_closing():
            self._transport.write_eof()


class Connection:
    """The learner's side and the syncer's side of one connection."""

    def __init__(
        self,
        pump: Pump,
        region: str,
        flows: dict[Direction, Flow],
        count: Callable[[Direction, int], None],
        forget: Callable[["Connection"], None],
        alter: Alter = lambda data, now: data,
    ) -> None:
        self.over = False
        self.flows = flows
        self._forget = forget
        up, down = pump.lane(region, "up"), pump.lane(region, "down")
        self.learner_side = Side(pump, up, flows["up"], True, lambda size: count("up", size), alter)
        self.syncer_side = Side(
            pump, down, flows["down"], False, lambda size: count("down", size), alter
        )
        for side in (self.learner_side, self.syncer_side):
            side.attach(self)

    def other(self, side: Side) -> Side:
        """The side at the other end."""
        return self.syncer_side if side is self.learner_side else self.learner_side

    def close_arrived(self, source: Side, reset: bool) -> None:
        """What `source` saw, its end closing or breaking, has come through the link."""
        if reset:
            self.abort()
        elif source.done and self.other(source).done:
            self.over = True
            self.learner_side.finish()
            self.syncer_side.finish()
            self._forget(self)
        else:
            self.other(source).end_writing()

    def abort(self) -> None:
        """End both sides at once; what is on its way is lost."""
        self.over = True
        self.learner_side.abort()
        self.syncer_side.abort()
        self._forget(self)
