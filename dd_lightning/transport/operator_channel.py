"""An operator's end of the channel: one control connection that asks and never joins.

One question at a time, each bounded. A session ends with the first thing that goes wrong; whoever
wants to go on makes another. All calls come from one thread.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import zmq

from dd_lightning.protocol import messages
from dd_lightning.protocol.messages import Query
from dd_lightning.transport import frames
from dd_lightning.transport.address import Address
from dd_lightning.transport.curve import OVERHEAD_BYTES, about_keys, secure_dialer
from dd_lightning.transport.frames import CONTROL
from dd_lightning.transport.keys import DialKeys
from dd_lightning.transport.rendezvous import Rendezvous
from dd_lightning.transport.wiring import FAILED, Monitor

OWN_KEY = "--key to an operator"
QUEUE = 16  # messages; one is under way at a time

_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CLOSED | FAILED


class OperatorError(ConnectionError):
    """The syncer did not answer; the text names its address and the cause."""


class Declined(OperatorError):
    """The syncer answered that it will not or could not, and why."""


class OperatorChannel:
    """Connects in at most `connect_timeout_s`, with `keys` encrypted. Raises OperatorError
    otherwise."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        connect_timeout_s: float = 5.0,
        keys: DialKeys | None = None,
    ) -> None:
        self.address = Address(rendezvous.host, rendezvous.channel_port)
        self._keys = keys
        self._about_keys = about_keys(keys, rendezvous.key_fingerprint, OWN_KEY)
        self._asked = 0
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor: Monitor | None = None
        try:
            self._open(connect_timeout_s)
        except BaseException:
            self.close()
            raise

    def _open(self, timeout_s: float) -> None:
        socket = self._socket
        overhead = OVERHEAD_BYTES if self._keys is not None else 0
        frames.limit(socket, self.address.host, frames.MAX_HEADER_BYTES, overhead)
        if self._keys is not None:
            secure_dialer(socket, self._keys)
        socket.setsockopt(zmq.SNDHWM, QUEUE)
        socket.setsockopt(zmq.RCVHWM, QUEUE)
        token = secrets.token_bytes(frames.TOKEN_BYTES).hex()
        socket.setsockopt(zmq.IDENTITY, frames.identity_of(CONTROL, token))
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        self._monitor = Monitor(self._context, socket, _EVENTS)
        socket.connect(str(self.address))
        self._wait_for(self._monitor.socket, time.monotonic() + timeout_s, timeout_s)
        for event, _ in self._monitor.drain():
            if event != zmq.Event.HANDSHAKE_SUCCEEDED:
                raise OperatorError(
                    f"{self.address}: no syncer's channel ({event.name.lower()}).{self._about_keys}"
                )
        socket.send(frames.HELLO, zmq.NOBLOCK)

    def ask(self, what: str, timeout_s: float) -> dict[str, Any]:
        """The answer's body, within `timeout_s`.

        Raises:
            Declined: the syncer says why not.
            OperatorError: no answer, or the connection is gone.
        """
        self._asked += 1
        deadline = time.monotonic() + timeout_s
        try:
            self._socket.send(messages.encode(Query(number=self._asked, what=what)), zmq.NOBLOCK)
        except zmq.Again:
            raise OperatorError(f"{self.address}: the connection is gone") from None
        while True:
            self._wait_for(self._socket, deadline, timeout_s)
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            try:
                answer, _ = frames.decode_frames(messages.decode_answer, CONTROL, parts)
            except ValueError as error:
                raise OperatorError(f"{self.address} sent what no syncer sends: {error}") from None
            if answer.number != self._asked:
                continue  # of a question before, whose time was over
            if answer.error:
                raise Declined(f"the syncer at {self.address} says: {answer.error}")
            return answer.body

    def _wait_for(self, socket: zmq.Socket, deadline: float, timeout_s: float) -> None:
        """Until `socket` can be read; what the monitor tells of an end counts only after it."""
        assert self._monitor is not None
        poller = zmq.Poller()
        for source in {socket, self._monitor.socket}:
            poller.register(source, zmq.POLLIN)
        remaining = max(0.0, deadline - time.monotonic())
        ready = dict(poller.poll(1000 * remaining))
        if socket in ready:
            return
        if ready:
            told = ", ".join(event.name.lower() for event, _ in self._monitor.drain())
            raise OperatorError(f"{self.address}: the connection is gone ({told})")
        raise OperatorError(f"{self.address}: no answer within {timeout_s:g} s")

    def close(self) -> None:
        """Drops what is under way."""
        if self._monitor is not None:
            self._monitor.close()
        self._socket.close(linger=0)
        self._context.term()
