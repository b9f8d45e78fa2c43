"""Which TCP connection of a ROUTER carries which session, by file descriptor.

ZeroMQ hides disconnects: only the socket monitor tells, by descriptor, and descriptors are used
again. So the order matters: the monitor is drained before a new identity is bound, and a
connection that closed unnamed is kept until every frame received before has been read. Not so if
its handshake failed: no frame of it can come, and the next on its descriptor may be a learner.
"""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass, field

import zmq

from dd_lightning.transport.wiring import FAILED


@dataclass(slots=True, eq=False)
class Connection:
    """One accepted TCP connection; `identity` is None until its first frame has been read."""

    fd: int
    peer: str  # host:port, or "unknown" if it was gone before we could ask
    identity: bytes | None = None
    closed: bool = False
    fault: int = 0  # ZeroMQ's number of what was wrong in the handshake
    failed: bool = False  # in the handshake
    opened_s: float = field(default_factory=time.monotonic)
    taken: int = 0  # bytes of it that have been read, as TCP counts them
    read: bool = False  # since `taken` was last set right
    verdict: str = ""  # why we close it
    told: bool = False  # of that


class Connections:
    """The connections of one ROUTER socket, from its monitor events."""

    def __init__(self) -> None:
        self._open: dict[int, Connection] = {}
        self._unnamed: list[Connection] = []  # closed before their first frame was read
        self._fault = 0  # told of a handshake whose connection closes next
        self._failed = False  # told of the same
        self._denied = 0  # handshakes that the allow-list ended and whose close is still to come

    @property
    def open(self) -> list[Connection]:
        """Those that have not closed, in order of arrival."""
        return list(self._open.values())

    def feed(self, events: list[tuple[zmq.Event, int]]) -> list[Connection]:
        """Takes monitor events in order; returns the named connections that have closed."""
        closed = []
        for event, fd in events:
            if event & FAILED:  # tells no descriptor
                self._handshake_failed(event, fd)
                continue
            fault, self._fault = self._fault, 0
            failed, self._failed = self._failed, False
            # an ACCEPTED without a close before it would mean a lost event: the old one is gone
            old = self._open.pop(fd, None)
            if old is not None:
                old.closed, old.fault = True, fault
                if old.identity is None and not failed and self._denied:
                    self._denied, failed = self._denied - 1, True
                old.failed = failed
                (self._unnamed if old.identity is None else closed).append(old)
            if event == zmq.Event.ACCEPTED:
                self._open[fd] = Connection(fd, _peer(fd))
        if self._denied and all(c.identity is not None for c in self._open.values()):
            self._denied = 0  # those have closed
        return closed

    def _handshake_failed(self, event: zmq.Event, value: int) -> None:
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._denied += 1  # the other end is told, and closes
        else:  # the one that closes next is meant
            self._failed = True
            self._fault = value if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL else 0

    def bind(self, identity: bytes, fd: int) -> Connection | None:
        """Names the connection whose first frame came over `fd`; None if it is unknown."""
        found = next((c for c in self._unnamed if c.fd == fd and not c.failed), None)
        if found is not None:
            self._unnamed.remove(found)
        else:
            found = self._open.get(fd)
            if found is None or found.identity is not None:
                return None
        found.identity = identity
        return found

    def take_unnamed(self) -> list[Connection]:
        """Those that closed without a frame; call once all frames have been read."""
        unnamed, self._unnamed = self._unnamed, []
        return unnamed


def _duplicate(fd: int) -> socket.socket | None:
    try:
        copy = os.dup(fd)
    except OSError:
        return None
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        return None


def _peer(fd: int) -> str:
    connection = _duplicate(fd)
    if connection is None:
        return "unknown"
    with connection:
        try:
            host, port = connection.getpeername()[:2]
        except (OSError, ValueError):
            return "unknown"
    return f"{host}:{port}"


def shut_down(connection: Connection) -> None:
    """Closes the TCP connection: ROUTER has no call for it. The other end sees it at once.

    The descriptor is duplicated first, then compared by peer, so that a descriptor which was
    closed and used again meanwhile cannot make us close somebody else's connection.
    """
    if connection.closed or connection.peer == "unknown":
        return
    copy = _duplicate(connection.fd)
    if copy is None:
        return
    with copy:
        try:
            host, port = copy.getpeername()[:2]
            if f"{host}:{port}" == connection.peer:
                copy.shutdown(socket.SHUT_RDWR)
        except (OSError, ValueError):
            return  # gone already, which is what was wanted
