"""Fragments wait for a session that takes one payload at a time; only the newest of each does."""

from __future__ import annotations

import pytest
import torch

from dd_lightning.protocol.messages import Fragment
from dd_lightning.syncer.outgoing import Outgoing
from dd_lightning.syncer.payload import encode_values

pytestmark = pytest.mark.unit


class Narrow:
    """A channel that takes a payload only when it is free."""

    def __init__(self) -> None:
        self.free = True
        self.took: list[tuple[str, int, tuple[int, int]]] = []

    def send(self, session, message, payload) -> bool:
        if not self.free:
            return False
        self.free = False
        self.took.append((session, message.fragment, message.version))
        return True


def put(outgoing: Outgoing, session: str, fragment: int, n: int) -> None:
    encoded = encode_values({"w": torch.full((2,), float(n))})
    message = Fragment(
        generation=1,
        fragment=fragment,
        version=(1, n),
        round=(1, n),
        merged_upto=None,
        payload=encoded.payload,
    )
    outgoing.put(session, message, encoded)


def test_the_newest_version_of_each_fragment_goes_out_in_order() -> None:
    channel = Narrow()
    outgoing = Outgoing(channel)
    for fragment, n in ((0, 1), (1, 1), (2, 1), (1, 2)):
        put(outgoing, "a", fragment, n)
    for _ in range(4):
        channel.free = True
        outgoing.flush()
    assert channel.took == [("a", 0, (1, 1)), ("a", 1, (1, 2)), ("a", 2, (1, 1))]


def test_an_ended_session_is_forgotten() -> None:
    channel = Narrow()
    outgoing = Outgoing(channel)
    for fragment in (0, 1):
        put(outgoing, "a", fragment, 1)
    outgoing.forget("a")
    channel.free = True
    outgoing.flush()
    assert channel.took == [("a", 0, (1, 1))]
