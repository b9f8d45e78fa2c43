"""Seeded nonsense for the syncer: messages of the right form with wild values, bytes that are none,
and a peer that speaks ZMTP by hand. One `random.Random` decides all: a failure can be repeated."""

from __future__ import annotations

import contextlib
import random
import socket
import types
import typing
from typing import Any

import msgspec

from dd_lightning.protocol.messages import TO_SYNCER, Message, Query

STRANGERS: tuple[type[Message], ...] = typing.get_args(TO_SYNCER)  # a learner's, `Join` first
KINDS = (*STRANGERS, Query)
INTEGERS = (-1, 0, 1, 2, 3, 5, 7, 1000, 2**31, 2**53 - 1, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-9, 0.5, 3.0, 1e300, float("inf"), float("nan"))
TEXTS = ("", "0", "1", "none", "values", "delta", "float32", "training", "paused", "x" * 300, "\0")
LONGEST = 3  # of the sequences made here


def message(random: random.Random, kinds: tuple[type[Message], ...] = KINDS) -> Message:
    """One message of a random kind; every field is of its type, within what the type allows."""
    return struct(random, random.choice(kinds))


def struct(random: random.Random, kind: type[Any], **fixed: Any) -> Any:
    """Draws until the message's own limits on its fields are met."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: value(random, hints[name]) for name in kind.__struct_fields__}
    return kind(**fields | fixed)


def value(random: random.Random, hint: Any) -> Any:
    """A value of an annotated type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _within(random, arguments[0], arguments[1])
    if origin in (typing.Union, types.UnionType):
        return value(random, random.choice(arguments))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            count = random.randrange(LONGEST + 1)
            return tuple(value(random, arguments[0]) for _ in range(count))
        return tuple(value(random, argument) for argument in arguments)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return struct(random, hint)
    plain = {
        int: INTEGERS,
        float: FLOATS,
        str: TEXTS,
        bool: (False, True),
        type(None): (None,),
    }
    return random.choice(plain[hint])


def _within(random: random.Random, hint: Any, meta: msgspec.Meta) -> Any:
    """A value that `meta` allows: drawn again until it does."""
    while True:
        drawn = value(random, hint)
        try:
            return msgspec.convert(drawn, typing.Annotated[hint, meta])
        except msgspec.ValidationError:
            continue


def mutated(random: random.Random, data: bytes) -> bytes:
    """The bytes with a few changed, cut out or put in."""
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(out) + 1)
        choice = random.randrange(4)
        if choice == 0 and at < len(out):
            out[at] ^= 1 << random.randrange(8)
        elif choice == 1:
            del out[at:]
        elif choice == 2:
            out[at:at] = random.randbytes(random.randrange(1, 9))
        else:
            del out[at : at + random.randrange(1, 9)]
    return bytes(out)


# ------------------------------------------------------------------------- ZMTP by hand

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
SECURE_GREETING = GREETING.replace(b"NULL\0", b"CURVE")
RAW = (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"\xff\0\0",
       GREETING[:30], b"\x00" * 100, b"\x05\x00abcd\x05\x00abcd")  # fmt: skip
WAIT_S = 60.0
MORE, LARGE, COMMAND = 1, 2, 4


def frame(body: bytes, flags: int = 0) -> bytes:
    """One frame of ZMTP 3."""
    if len(body) > 255:
        return bytes([flags | LARGE]) + len(body).to_bytes(8, "big") + body
    return bytes([flags, len(body)]) + body


def wire(*parts: bytes) -> bytes:
    """The frames of one message."""
    return b"".join(frame(part, MORE) for part in parts[:-1]) + frame(parts[-1])


def ready(identity: bytes) -> bytes:
    """The command that ends the handshake of a DEALER."""
    properties = b""
    for name, value in ((b"Socket-Type", b"DEALER"), (b"Identity", identity)):
        properties += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return frame(b"\x05READY" + properties, COMMAND)


def dial(port: int, identity: bytes, first: bytes | None = b"") -> socket.socket:
    """A connection after its handshake, with a `first` message sent (None: none)."""
    with contextlib.ExitStack() as undo:
        connection = undo.enter_context(socket.create_connection(("127.0.0.1", port), WAIT_S))
        connection.sendall(GREETING + ready(identity))
        heard = b""
        while len(heard) <= len(GREETING):  # its greeting, and its READY, which comes in one piece
            part = connection.recv(4096)
            if not part:
                raise ConnectionResetError("closed in the handshake")
            heard += part
        undo.pop_all()
    if first is not None:
        connection.sendall(wire(first))
    return connection


def hang_up(connection: socket.socket) -> None:
    """Closes it once the other end has read all that was sent, and closed too."""
    with connection, contextlib.suppress(OSError):  # closed by the other end: what is waited for
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            continue


def say(port: int, identity: bytes, *messages: bytes, dials: int = 1) -> None:
    """Connects, sends what `wire` made, and hangs up.

    Args:
        dials: tries. A syncer that is behind counts connections that have ended among the
            strangers it bears, and may close one more in its handshake.
    """
    for _ in range(dials - 1):
        with contextlib.suppress(ConnectionResetError):
            connection = dial(port, identity)
            break
    else:
        connection = dial(port, identity)
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # refused in the middle
        connection.sendall(b"".join(messages))
    hang_up(connection)
