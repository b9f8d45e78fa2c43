"""What connections may cost the syncer that have not been let into the run, or do not behave.

ZeroMQ keeps a message until its last frame has come, however many there are, and whole ones until
they are read. So on Linux the kernel is asked how many bytes each connection has received: those
that hold too much unread are closed, as are strangers that say nothing, or come in crowds. (Without
keys only: with them, nobody gets so far whose key is not on the allow-list.)
"""

from __future__ import annotations

import errno
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from dd_lightning.transport.connections import Connection, Connections
from dd_lightning.transport.frames import DATA, MAX_HEADER_BYTES

SWEEP_S = 0.1  # between two looks
SILENT_S = 30.0  # a connection whose session has said nothing of ours for so long is closed
MOST_SILENT = 512  # such connections at a time; the oldest are closed
MOST_UNREAD_BYTES = MAX_HEADER_BYTES + (1 << 20)  # of one that was not let in: a Join fits
MOST_STRANGE_BYTES = 64 << 20  # of all those together
CONTROL_UNREAD_BYTES = 8 * MAX_HEADER_BYTES  # of a learner's control connection
OWN_BYTES = 4096  # of ZeroMQ itself between two messages
_RECEIVED_AT = 128  # offset of tcpi_bytes_received, 64 bits, in Linux' struct tcp_info


@dataclass(frozen=True, slots=True)
class Standing:
    """Of a session: `heard` well-formed messages from it; `trusted`: it was let into the run."""

    heard: bool
    trusted: bool


NOBODY = Standing(heard=False, trusted=False)


class Strangers:
    """Watches the connections of one ROUTER."""

    def __init__(self, connections: Connections, max_message_bytes: int) -> None:
        self._connections = connections
        self._data_bytes = 2 * max_message_bytes + MAX_HEADER_BYTES
        self._due_s = 0.0

    def sweep(
        self, now: float, drained: bool, standing: Callable[[bytes | None], Standing]
    ) -> list[Connection]:
        """Those to close, each with its `verdict`; [] between two looks.

        Args:
            drained: every whole message that had come has been read.
            standing: of the session that an identity belongs to.
        """
        if now < self._due_s:
            return []
        self._due_s = now + SWEEP_S
        strange: list[tuple[int, Connection]] = []
        silent: list[Connection] = []
        for connection in self._connections.open:
            if connection.verdict:
                continue
            its = standing(connection.identity)
            unread = _unread(connection, drained)
            most = MOST_UNREAD_BYTES
            if its.trusted:
                is_data = (connection.identity or b"")[:1] == DATA
                most = self._data_bytes if is_data else CONTROL_UNREAD_BYTES
            else:
                strange.append((unread, connection))
            if unread > most:
                connection.verdict = f"{unread} bytes of it wait unread, at most {most}"
            elif not its.heard:
                silent.append(connection)
                if now - connection.opened_s > SILENT_S:
                    connection.verdict = f"no message of this protocol within {SILENT_S:g} s"
        _limit_bytes(strange)
        for connection in silent[: max(0, len(silent) - MOST_SILENT)]:  # in order of arrival
            connection.verdict = f"over {MOST_SILENT} connections that have said nothing"
        return [c for c in self._connections.open if c.verdict and not c.closed]


def _limit_bytes(strange: list[tuple[int, Connection]]) -> None:
    total = sum(unread for unread, _ in strange)
    for unread, connection in sorted(strange, key=lambda pair: pair[0], reverse=True):
        if total <= MOST_STRANGE_BYTES:
            return
        total -= unread
        connection.verdict = f"strangers hold over {MOST_STRANGE_BYTES} bytes, it the most of them"


def _unread(connection: Connection, drained: bool) -> int:
    """Bytes received and not yet read; 0 where the system does not tell."""
    received = bytes_received(connection.fd)
    if received is None:
        return 0
    if drained and connection.read:
        # handshake and heartbeats, which we never see as frames; the rest is a message to come
        forgiven = min(OWN_BYTES, max(0, received - connection.taken))
        connection.taken, connection.read = connection.taken + forgiven, False
    return max(0, received - connection.taken)


def bytes_received(fd: int) -> int | None:
    """By the TCP connection behind a descriptor that stays its owner's; None if it is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        borrowed = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
    except OSError:
        return None  # closed meanwhile
    try:
        info = borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_AT + 8)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOTSOCK, errno.EOPNOTSUPP, errno.ENOPROTOOPT):
            raise
        return None  # the descriptor is somebody else's by now
    finally:
        borrowed.detach()
    if len(info) < _RECEIVED_AT + 8:
        return None
    return int.from_bytes(info[_RECEIVED_AT:], sys.byteorder)
