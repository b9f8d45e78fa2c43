"""What both ends of the channel share: identities, limits, framing, checksums and events.

Decides what a well-formed message is; opens no socket. A message is [header] on the control
connection or [header, payload] on the data connection, decided by its type alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from dd_lightning.protocol.messages import Message, Payload

CONTROL, DATA = b"c", b"d"
TOKEN_BYTES = 16
IDENTITY_BYTES = 1 + TOKEN_BYTES
HELLO = b""  # first frame on each connection: tells the syncer which session it belongs to

MAX_HEADER_BYTES = 4 << 20  # a Join carries the table of tensors

HEARTBEAT_S = 0.5  # ZeroMQ's own, answered by its threads however busy the syncer is
SILENCE_S = 10.0  # a control connection without any sign for so long is closed (either end)
HANDSHAKE_S = 10.0  # a connection that does not finish its greeting is closed

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message. `payload` is a view of the received frame: keep it as long as you like."""

    session: str
    message: Message
    payload: memoryview | None
    num_bytes: int  # on the wire, framing included


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session has ended; reported once. What was sent and not yet received is lost."""

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message of ours; they had no effect. `peer`: where they came from."""

    peer: str
    reason: str


def split_identity(identity: bytes) -> tuple[bytes, str] | None:
    """(CONTROL or DATA, session) of a learner's identity; None for anybody else's."""
    if len(identity) != IDENTITY_BYTES or identity[:1] not in (CONTROL, DATA):
        return None
    return identity[:1], identity[1:].hex()


def identity_of(role: bytes, session: str) -> bytes:
    return role + bytes.fromhex(session)


def payload_of(message: Message) -> Payload | None:
    """The description of the bytes that travel beside this message; None if none do."""
    return getattr(message, "payload", None)


def digest(data: Buffer) -> str:
    """crc32 of the bytes, eight hex digits (`Payload.digest`)."""
    return f"{zlib.crc32(data):08x}"


def payload_fault(description: Payload, data: Buffer) -> str | None:
    """The protocol's reason for refusing these bytes: "byte count", "checksum" or None."""
    if memoryview(data).nbytes != description.num_bytes:
        return "byte count"
    if digest(data) != description.digest:
        return "checksum"
    return None


def wire_size(*sizes: int, overhead: int = 0) -> int:
    """Bytes that frames of these sizes take in ZMTP 3.1: 2 bytes of framing, 9 above 255, around
    the frame and the `overhead` that its encryption adds."""
    grown = [size + overhead for size in sizes]
    return sum(size + (2 if size <= 255 else 9) for size in grown)


def decode_frames(
    decode: Callable[[bytes | memoryview], Message], role: bytes, frames: list[zmq.Frame]
) -> tuple[Message, memoryview | None]:
    """The message in frames that came over the `role` connection. Raises ValueError, saying why."""
    if not 1 <= len(frames) <= 2:
        raise ValueError(f"{len(frames)} frames, a message has 1 or 2")
    if len(frames[0]) > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {len(frames[0])} bytes, at most {MAX_HEADER_BYTES}")
    message = decode(frames[0].buffer)
    name = type(message).__name__
    has_payload = payload_of(message) is not None
    if has_payload != (len(frames) == 2):
        raise ValueError(f"{name} {'without its' if has_payload else 'with a'} payload")
    if has_payload != (role == DATA):
        raise ValueError(f"{name} on the {'control' if role == CONTROL else 'data'} connection")
    return message, frames[1].buffer if has_payload else None


def check_outgoing(
    message: Message, header: bytes, payload: Buffer | None, max_message_bytes: int
) -> None:
    """Raises ValueError for a message that the other end would refuse: a bug or a setting."""
    name = type(message).__name__
    if (payload_of(message) is None) != (payload is None):
        wants = "no payload" if payload_of(message) is None else "a payload"
        raise ValueError(f"{name} travels with {wants}; the send call was given otherwise.")
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(
            f"The header of {name} has {len(header)} bytes, at most {MAX_HEADER_BYTES}. "
            "A model with so many tensors needs shorter names or fewer tensors."
        )
    if payload is not None and memoryview(payload).nbytes > max_message_bytes:
        raise ValueError(
            f"The payload of {name} has {memoryview(payload).nbytes} bytes, max_message_bytes is "
            f"{max_message_bytes}. Use more fragments, or raise max_message_bytes at both ends."
        )


def limit(socket: zmq.Socket, host: str, max_message_bytes: int, overhead: int = 0) -> None:
    """Options that every socket of the channel has. `overhead`: of encryption, on each frame."""
    socket.setsockopt(zmq.LINGER, 0)
    most = max(max_message_bytes, MAX_HEADER_BYTES) + overhead
    socket.setsockopt(zmq.MAXMSGSIZE, most)
    socket.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S))
    socket.setsockopt(zmq.IPV6, int(":" in host))
