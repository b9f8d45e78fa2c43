"""Seeded nonsense for the syncer: messages of the right form with wild values, and bytes that are
none. One `random.Random` decides everything, so a failure can be repeated."""

from __future__ import annotations

import random
import types
import typing
from typing import Any

import msgspec

from dd_lightning.protocol.messages import (
    Applied,
    Checkpointed,
    Contribution,
    Finish,
    Goodbye,
    Initial,
    Join,
    Message,
    Nothing,
    Progress,
    Query,
    Received,
)

KINDS: tuple[type[Message], ...] = (
    Join,
    Initial,
    Progress,
    Contribution,
    Nothing,
    Received,
    Applied,
    Checkpointed,
    Finish,
    Goodbye,
    Query,
)
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
