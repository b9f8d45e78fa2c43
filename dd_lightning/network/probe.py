"""Measures request-acknowledge times over a real connection, and says what the model expects."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Self

from dd_lightning.network.link import LinkModel
from dd_lightning.network.profiles import WanProfile

PROBE_TIMEOUT_S = 60.0  # for each wait of either end
_LENGTH = struct.Struct(">Q")
_MAX_REQUEST_BYTES = 2**30
_ACK = b"k"


class AckServer:
    """Reads length-prefixed requests and answers each with one byte; a context manager.

    `connections` holds them in order, `sources` the source address of each.

    Args:
        receive_bytes: of each connection's buffer, which limits its TCP window; None: the system's.
    """

    def __init__(self, host: str = "127.0.0.1", receive_bytes: int | None = None) -> None:
        self.sources: list[str] = []
        self._listener = socket.create_server((host, 0))
        if receive_bytes is not None:  # accepted sockets inherit it
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.host, self.port = self._listener.getsockname()[:2]
        self._threads: list[threading.Thread] = []
        self.connections: list[socket.socket] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for sock in (self._listener, *self.connections):
            with contextlib.suppress(OSError):  # the other end was faster
                sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
        for thread in self._threads:
            thread.join(PROBE_TIMEOUT_S)
        for sock in (self._listener, *self.connections):
            sock.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, source = self._listener.accept()
            except OSError:
                return  # closed
            self.sources.append(source[0])
            self.connections.append(connection)
            self._start(self._answer, connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        buffer = bytearray(2**16)
        try:
            while header := connection.recv(_LENGTH.size, socket.MSG_WAITALL):
                left = _LENGTH.unpack(header)[0]
                if left > _MAX_REQUEST_BYTES:
                    return
                while left:
                    got = connection.recv_into(buffer, min(left, len(buffer)))
                    if not got:
                        return
                    left -= got
                connection.sendall(_ACK)
        except OSError:
            return  # closed or reset under us


def request_times(
    address: tuple[str, int],
    sizes: Iterable[int],
    repeats: int,
    warm_up_bytes: int = 0,
    *,
    idle_s: float = 0.0,
    congestion: str | None = None,
) -> dict[int, list[float]]:
    """Seconds from sending a request of each size to its acknowledgement, over one connection.

    Args:
        repeats: requests of each size; sizes take turns, so that a disturbance hits them all.
        warm_up_bytes: a first request that is not counted and opens the TCP window.
        idle_s: pause before each request.
        congestion: TCP's congestion control by name (Linux); None: the system's.
    """
    times: dict[int, list[float]] = {size: [] for size in sizes}
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if congestion is not None:
            # before connecting: a connection that began with bbr is paced for ever, which spreads
            # each flight of another control's slow start over half a round trip
            name = congestion.encode()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        connection.connect(address)

        def request(size: int) -> float:
            message = _LENGTH.pack(size) + bytes(size)
            begin = time.monotonic()
            connection.sendall(message)
            if connection.recv(1) != _ACK:
                raise ConnectionError(f"no acknowledgement for a request of {size} bytes")
            return time.monotonic() - begin

        if warm_up_bytes:
            request(warm_up_bytes)
        for _ in range(repeats):
            for size in times:
                time.sleep(idle_s)
                times[size].append(request(size))
    return times


def expected_request_s(
    profile: WanProfile, region: str, num_bytes: int, warm_up_bytes: int = 0
) -> float:
    """What the link model says for the same exchange, without outages' hits."""
    model = LinkModel(profile)
    up, down = model.path(region, "up"), model.path(region, "down")
    begin = 0.0
    if warm_up_bytes:
        begin = down.send(up.send(begin, warm_up_bytes), len(_ACK))
    return down.send(up.send(begin, _LENGTH.size + num_bytes), len(_ACK)) - begin
