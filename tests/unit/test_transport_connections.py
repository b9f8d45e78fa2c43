"""Descriptors that are used again: which connection a first frame belongs to."""

from __future__ import annotations

import socket

import pytest
from zmq import Event

from dd_lightning.transport.connections import Connections
from dd_lightning.transport.wiring import OTHER_MECHANISM, WRONG_KEY

pytestmark = pytest.mark.unit
FAILURES = {
    "no greeting": [(Event.HANDSHAKE_FAILED_NO_DETAIL, 104)],
    "another key": [(Event.HANDSHAKE_FAILED_PROTOCOL, WRONG_KEY)],
    "no key": [(Event.HANDSHAKE_FAILED_PROTOCOL, OTHER_MECHANISM)],
    "not allowed": [(Event.HANDSHAKE_FAILED_AUTH, 400)],
}


@pytest.fixture
def descriptor():
    with socket.socket() as one:
        yield one.fileno()


@pytest.mark.parametrize("failure", FAILURES)
def test_a_frame_is_not_of_one_whose_handshake_failed(descriptor, failure):
    connections = Connections()
    connections.feed([(Event.ACCEPTED, descriptor), *FAILURES[failure]])
    connections.feed([(Event.DISCONNECTED, descriptor), (Event.ACCEPTED, descriptor)])
    learner = connections.bind(b"identity", descriptor)
    assert learner is not None and not learner.closed
    (stranger,) = connections.take_unnamed()
    assert stranger.closed and stranger.identity is None
    assert connections.feed([(Event.DISCONNECTED, descriptor)]) == [learner]


def test_a_frame_is_of_one_that_closed_after_its_handshake(descriptor):
    connections = Connections()
    connections.feed([(Event.ACCEPTED, descriptor), (Event.DISCONNECTED, descriptor)])
    connections.feed([(Event.ACCEPTED, descriptor)])
    first = connections.bind(b"first", descriptor)
    second = connections.bind(b"second", descriptor)
    assert first is not None and first.closed
    assert second is not None and not second.closed
    assert connections.take_unnamed() == []


@pytest.mark.parametrize("denied", [1, 3])
def test_a_denial_is_of_one_that_closes_later_whichever(denied):
    connections = Connections()
    with socket.socket() as one, socket.socket() as other:
        descriptors = one.fileno(), other.fileno()
        connections.feed([(Event.ACCEPTED, fd) for fd in descriptors])
        connections.feed([(Event.HANDSHAKE_FAILED_AUTH, 400)] * denied)
        connections.feed([(Event.DISCONNECTED, fd) for fd in descriptors])
        failed = [connection.failed for connection in connections.take_unnamed()]
    assert failed == [True, denied > 1]
