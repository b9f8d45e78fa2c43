"""CURVE on the channel's sockets, and who is let in: ZeroMQ asks by ZAP, the `Gate` answers.

With keys on, no byte of a message is taken before its sender has proven to hold the secret of a
key on the allow-list; without, nothing here is used and the channel is plain.
"""

from __future__ import annotations

import logging
from collections import deque

import zmq
from zmq.utils import z85

from dd_lightning.transport.keys import DialKeys, SyncerKeys, read_allowed

log = logging.getLogger(__name__)

ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where ZeroMQ asks, one per context
ZAP_DOMAIN = b"dd"
REFUSALS_KEPT = 256  # whose closed connection has not been seen yet
MAX_BATCH = 64  # answers per poll
OVERHEAD_BYTES = 33  # of CURVE on each frame: command name, nonce, flags and authenticator


def secure_dialer(socket: zmq.Socket, keys: DialKeys) -> None:
    """Makes a socket of a learner or operator talk to the holder of the syncer's key alone."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, keys.syncer)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def about_keys(keys: DialKeys | None, hint: str, option: str) -> str:
    """What the store's fingerprint makes of a greeting that failed; "" if it explains nothing.

    A stranger may have written it, so it is for the message alone: whom one talks to, the key
    decides. `option`: how this one is given its key file, as "DD_KEY to this learner".
    """
    if keys is None:
        return f" The syncer there asks for a key: set {option}'s key file." if hint else ""
    mine = f" {keys.file} is for the syncer with key {keys.fingerprint}"
    if not hint:
        return f"{mine}; the one there says it has none (dd-lightning syncer --key)."
    if hint != keys.fingerprint:
        return (
            f"{mine}; the one there says its own is {hint}. Take the key file that was made with "
            "that syncer's, or dial the right syncer."
        )
    return ""


def secure_listener(socket: zmq.Socket, keys: SyncerKeys) -> None:
    """Before `bind`, and after a `Gate` stands in the same context: without one nobody gets in."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


class Gate:
    """Answers ZeroMQ's questions about keys. Its `socket` belongs in the poller of the channel.

    The allow-list is read again whenever its files have changed: a learner can be added to a run
    that is going on. A list that has become unreadable lets in who was let in before, and says so.
    """

    def __init__(self, context: zmq.Context, keys: SyncerKeys) -> None:
        self._keys = keys
        self._stamp = self._changed()
        self._allowed = read_allowed(keys.allow)
        self._refused: deque[tuple[str, str]] = deque(maxlen=REFUSALS_KEPT)  # (host, reason)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(ZAP_ENDPOINT)

    def answer(self) -> None:
        """Answers what has been asked; never blocks."""
        for _ in range(MAX_BATCH):
            try:
                asked = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, number, *rest = asked  # ZeroMQ itself asks: the form is the standard's
            name = self._who(rest)
            status = (b"400", b"not on the allow-list", b"")
            if name is not None:
                status = (b"200", b"OK", name.encode()[:255])
            self.socket.send_multipart([version, number, *status, b""], zmq.NOBLOCK)

    def refusal(self, host: str) -> str:
        """Why a connection from there that has just closed was not let in; "" if that is not why.
        Each refusal is told once. `host`: "" where it closed before it could be asked."""
        for refused in self._refused:
            if host in ("", refused[0]):
                self._refused.remove(refused)
                return refused[1]
        return ""

    def close(self) -> None:
        """After the listening socket."""
        self.socket.close(linger=0)

    def _who(self, asked: list[bytes]) -> str | None:
        """The name of who asks; None if not let in. Asked: domain, host, identity, mechanism, key.

        Another mechanism than CURVE never gets here: ZeroMQ compares them before it asks.
        """
        _domain, address, _identity, mechanism, *credentials = asked
        host = address.decode(errors="replace")
        if mechanism != b"CURVE" or len(credentials) != 1:
            return None
        self._reread()
        key = z85.encode(credentials[0])
        name = self._allowed.get(key)
        if name is None:
            self._refused.append((host, f"its key {key.decode()} is not on the allow-list"))
        return name

    def _reread(self) -> None:
        stamp = self._changed()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._allowed = read_allowed(self._keys.allow)
        except ValueError as error:
            log.warning("the allow-list stays as it was: %s", error)

    def _changed(self) -> tuple[tuple[str, int, int], ...]:
        """Names, times and sizes of the allow-list's files."""
        allow = self._keys.allow
        files = sorted(allow.glob("*.yaml")) if allow.is_dir() else [allow]
        found = []
        for file in files:
            try:
                state = file.stat()
            except OSError:
                continue  # gone: the list has changed, which is what is asked here
            found.append((str(file), state.st_mtime_ns, state.st_size))
        return tuple(found)
