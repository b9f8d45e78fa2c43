"""Small parts of both channels: the monitor of a socket, and waking a poll from other threads."""

from __future__ import annotations

import socket
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

FAILED = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


WRONG_KEY, OTHER_MECHANISM = 0x11000001, 0x11000002  # values of HANDSHAKE_FAILED_PROTOCOL


def readable(socket: zmq.Socket) -> bool:
    """Whether a message waits. A tenth of the cost of being told so by `zmq.Again`, which counts
    in a thread that shares its core with training."""
    return bool(socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)


class Monitor:
    """Connection events of one ZeroMQ socket, in order. Used from the thread of that socket."""

    def __init__(self, context: zmq.Context, watched: zmq.Socket, events: int) -> None:
        address = f"inproc://monitor-{id(watched):x}"
        self._watched = watched
        watched.monitor(address, events)
        self.socket = context.socket(zmq.PAIR)
        # Unbounded: a full monitor would stall the I/O thread. It is drained at every poll.
        self.socket.setsockopt(zmq.RCVHWM, 0)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def drain(self) -> list[tuple[zmq.Event, int]]:
        """All (event, value) so far; value is the file descriptor of the TCP connection."""
        events = []
        while readable(self.socket):
            event = recv_monitor_message(self.socket, zmq.NOBLOCK)
            events.append((zmq.Event(event["event"]), event["value"]))
        return events

    def close(self) -> None:
        self._watched.disable_monitor()
        self.socket.close(linger=0)


class Waker:
    """Lets any thread end another thread's poll: a socket pair, its reading end in the poller."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._lock = threading.Lock()
        self._closed = False

    def wake(self) -> None:
        """Thread-safe; does nothing once closed."""
        with self._lock:
            if self._closed:
                return
            try:
                self._writer.send(b"w")
            except BlockingIOError:
                return  # full: the poll is awake already

    def clear(self) -> bool:
        """Whether somebody woke us since the last call."""
        try:
            return bool(self.reader.recv(4096))
        except BlockingIOError:
            return False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.reader.close()
            self._writer.close()
