"""How a learner that knows one address finds the syncer's channel: `lookup`, one bounded attempt.

The store at that address is torch's TCPStore, without authentication: everything in it is checked
as if a stranger had written it, and nothing in it can make a caller wait past its bound.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

from dd_lightning.protocol.messages import PROTOCOL_VERSION
from dd_lightning.transport.address import Address, parse_address
from dd_lightning.transport.store_server import StoreServer, serve_store

__all__ = [
    "KEYS",
    "ProtocolMismatch",
    "Rendezvous",
    "RendezvousError",
    "RendezvousTimeout",
    "StoreServer",
    "lookup",
    "parse_address",
    "rendezvous_values",
    "serve_store",
]

PREFIX = "dd/"
KEYS = ("protocol", "run_id", "channel_port", "key_fingerprint", "advertise")
MAX_ANSWER_BYTES = 64 << 10  # everything a store may send during one lookup
MAX_VALUE_CHARS = 256
JOIN_S = 1.0  # for the client thread to end once its connection is closed


class RendezvousError(ConnectionError):
    """No usable syncer at the address; the text names the address and the cause."""


class RendezvousTimeout(TimeoutError):
    """Nothing usable came from the address in time; the text names both."""


class ProtocolMismatch(RendezvousError):
    """The syncer speaks another version of the protocol: trying again will not help."""


_CLOSED = "{}: closed the connection: no syncer's store, or it ended."


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the channel of a run is."""

    host: str
    channel_port: int
    run_id: str
    protocol: int
    key_fingerprint: str


def rendezvous_values(
    run_id: str, channel_port: int, key_fingerprint: str = "", advertise: str = ""
) -> dict[str, str]:
    """What a syncer publishes with `serve_store`."""
    values = (str(PROTOCOL_VERSION), run_id, str(channel_port), key_fingerprint, advertise)
    return {PREFIX + key: value for key, value in zip(KEYS, values, strict=True)}


def lookup(address: str, timeout_s: float, silence_s: float = 0.0) -> Rendezvous:
    """One attempt to read the store at `address`, within `timeout_s` seconds.

    `silence_s`: hear so long first whether the other end closes, as a proxy or tunnel does whose
    syncer is away. A TCPStore client would find that out too, in twenty times the processor time
    (it retries, and writes a stack trace for each), which a training process should not pay.

    Raises ValueError for an address that cannot be read, RendezvousError if it is closed or holds
    nonsense (ProtocolMismatch: another version), RendezvousTimeout if it did not answer.
    """
    target = parse_address(address)
    deadline = time.monotonic() + timeout_s
    try:
        remote = socket.create_connection((target.host, target.port), timeout_s)
    except TimeoutError:
        raise RendezvousTimeout(f"{target}: no connection within {timeout_s:g} s.") from None
    except OSError as error:
        cause = error.strerror or error
        raise RendezvousError(f"{target}: {cause}. Is the syncer running there?") from None
    with remote:
        if _closes(remote, min(silence_s, timeout_s)):
            raise RendezvousError(_CLOSED.format(target))
        values = _read(target, remote, deadline, timeout_s)
    return _checked(target, values)


def _closes(remote: socket.socket, silence_s: float) -> bool:
    """Whether the other end closes within so long; a store says nothing before it is asked."""
    if silence_s <= 0:
        return False
    remote.settimeout(silence_s)
    try:
        return not remote.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return False
    except OSError:
        return True


class _Client:
    """A TCPStore client in a thread of its own, connected to `port` of this machine."""

    def __init__(self, port: int, timeout_s: float, done: socket.socket) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self._port = port
        # a little less than the bound: a store without our keys is left in good order
        self._timeout = timedelta(seconds=0.9 * timeout_s)
        self._done = done
        self.thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        from torch.distributed import TCPStore

        try:
            store = TCPStore(
                "127.0.0.1",
                self._port,
                is_master=False,
                wait_for_workers=False,
                timeout=self._timeout,
            )
            keys = [PREFIX + key for key in KEYS]
            store.wait(keys, self._timeout)
            self.values = {key: store.get(PREFIX + key) for key in KEYS}
        except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
            self.error = error
        finally:
            self._done.close()


def _read(
    target: Address, remote: socket.socket, deadline: float, timeout_s: float
) -> dict[str, bytes]:
    """The raw values. The client talks to us and we pass its bytes on, because a TCPStore client
    ignores its timeout when a server accepts and stays silent (seen: ten minutes), and believes
    any length. Closing our end is what bounds it."""
    done, signal = socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener, done:
        client = _Client(listener.getsockname()[1], timeout_s, signal)
        listener.settimeout(max(0.001, deadline - time.monotonic()))
        ended = "timeout"
        try:
            local, _ = listener.accept()
        except TimeoutError:
            local = None
        if local is not None:
            with local:
                listener.close()  # a client whose connection we closed finds no second one
                ended = _relay(local, remote, done, deadline)
    client.thread.join(JOIN_S)
    if ended == "done" and client.error is None:
        return client.values
    if ended == "too much":
        raise RendezvousError(f"{target}: sent over {MAX_ANSWER_BYTES} bytes: no syncer's store.")
    if ended == "closed":
        raise RendezvousError(_CLOSED.format(target))
    if ended == "done" and "wait timeout" not in str(client.error):
        raise RendezvousError(f"{target}: {str(client.error).splitlines()[0]}")
    raise RendezvousTimeout(
        f"{target}: no answer of a syncer within {timeout_s:g} s: either it is not ready yet, or "
        "something else listens there."
    )


def _relay(
    local: socket.socket, remote: socket.socket, done: socket.socket, deadline: float
) -> str:
    """Passes bytes both ways until: "done" | "closed" (by the store) | "too much" | "timeout"."""
    received = 0
    with selectors.DefaultSelector() as selector:
        for source in (local, remote, done):
            selector.register(source, selectors.EVENT_READ)
        while (remaining := deadline - time.monotonic()) > 0:
            ready = {key.fileobj for key, _ in selector.select(remaining)}
            remote.settimeout(max(0.001, remaining))
            try:
                if remote in ready:
                    data = remote.recv(16384)
                    received += len(data)
                    if not data:
                        return "closed"
                    if received > MAX_ANSWER_BYTES:
                        return "too much"
                    local.sendall(data)
                if done in ready:
                    return "done"
                if local in ready:
                    data = local.recv(16384)
                    if not data:
                        selector.unregister(local)
                    remote.sendall(data)
            except TimeoutError:
                return "timeout"
            except OSError:
                return "closed"
    return "timeout"


def _checked(target: Address, raw: dict[str, bytes]) -> Rendezvous:
    values = {}
    for key, value in raw.items():
        try:
            values[key] = value.decode("ascii")
        except UnicodeDecodeError:
            values[key] = ""
        if len(value) > MAX_VALUE_CHARS or (value and not values[key].isprintable()):
            raise RendezvousError(f"{target}: {PREFIX}{key} in the store there is nonsense.")
    if values["protocol"] != str(PROTOCOL_VERSION):
        raise ProtocolMismatch(
            f"{target}: the syncer speaks protocol version {values['protocol']!r}, this learner "
            f"{PROTOCOL_VERSION}. Install the same version of dd-lightning at both ends."
        )
    port = values["channel_port"]
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise RendezvousError(
            f"{target}: {PREFIX}channel_port is {port!r}, not a port: no syncer has written it."
        )
    if not values["run_id"]:
        raise RendezvousError(f"{target}: {PREFIX}run_id is empty: no syncer has written it.")
    host = values["advertise"] or target.host
    return Rendezvous(
        host, int(port), values["run_id"], PROTOCOL_VERSION, values["key_fingerprint"]
    )
