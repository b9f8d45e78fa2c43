"""Peers that send without end, say nothing, or come in crowds: closed, counted, harming nobody."""

import contextlib
import random
import socket

import pytest

from dd_lightning.protocol.messages import seal
from dd_lightning.transport import strangers
from dd_lightning.transport.frames import Arrival, Disconnected, Malformed, identity_of
from dd_lightning.transport.strangers import MOST_UNREAD_BYTES, bytes_received
from dd_lightning.transport.syncer_channel import MOST_ODD
from tests.fuzzing import MORE, dial, frame, say, wire
from tests.transport_samples import connected, count, goodbye, until

pytestmark = pytest.mark.integration
MIB = 1 << 20


def reasons(events):
    return [event.reason for event in events if isinstance(event, Malformed)]


def unharmed(syncer, learner):
    assert learner.send(goodbye("unharmed"))
    events = until(syncer, count(Arrival, 1))
    ended = [e.session for e in events if isinstance(e, Disconnected)]
    assert learner.session not in ended


def identity(seed):
    return identity_of(b"c", random.Random(seed).randbytes(16).hex())


def send_until_refused(syncer, connection, part):
    """How much was sent and what was said by then."""
    connection.settimeout(0.05)
    sent, events = 0, []
    with contextlib.suppress(ConnectionError):
        while sent < 500 * MIB and not reasons(events):
            with contextlib.suppress(TimeoutError):
                sent += connection.send(memoryview(part)[sent % len(part) :])
            events += syncer.poll(0)
    return sent, events


@pytest.mark.parametrize("named", [True, False], ids=["in a session", "before its first message"])
def test_a_message_without_end_is_cut_off(named):
    with connected() as (syncer, learner):
        with dial(syncer.port, identity(1), b"" if named else None) as connection:
            part = frame(bytes(MIB), MORE)
            sent, events = send_until_refused(syncer, connection, part)
        events += until(syncer, lambda more: reasons(events + more))
        until(syncer, lambda _: len(syncer._connections.open) == 2)
        # of this connection alone, or of all strangers together, whichever is noticed first
        cut_off = ("wait unread", "strangers hold over")
        assert any(word in reason for reason in reasons(events) for word in cut_off), events
        assert MOST_UNREAD_BYTES < sent < 500 * MIB
        unharmed(syncer, learner)


def test_a_message_of_very_many_frames():
    with connected() as (syncer, learner):
        say(syncer.port, identity(2), frame(b"", MORE) * 100_000 + frame(b""))
        (event, *_) = until(syncer, count(Malformed, 1))
        assert "frames, a message has 1 or 2" in event.reason
        unharmed(syncer, learner)


def test_strangers_hold_little_all_together(monkeypatch):
    monkeypatch.setattr(strangers, "MOST_STRANGE_BYTES", 5 * MIB)
    with connected() as (syncer, learner), contextlib.ExitStack() as close:
        for seed in range(4):
            connection = close.enter_context(dial(syncer.port, identity(seed)))
            connection.sendall(frame(bytes(2 * MIB), MORE))
        events = until(syncer, count(Malformed, 2))
        assert all("strangers hold over" in reason for reason in reasons(events))
        until(syncer, lambda _: len(syncer._connections.open) == 2 + 2)
        unharmed(syncer, learner)


def test_a_crowd_that_says_nothing_is_thinned(monkeypatch):
    monkeypatch.setattr(strangers, "MOST_SILENT", 5)
    with connected() as (syncer, learner), contextlib.ExitStack() as close:
        learner.send(goodbye())  # it has been heard
        until(syncer, count(Arrival, 1))
        for seed in range(6):  # some with a handshake, some without
            close.enter_context(dial(syncer.port, identity(seed)))
            close.enter_context(socket.create_connection(("127.0.0.1", syncer.port)))
        until(syncer, lambda _: len(syncer._connections.open) == 2 + 5)
        monkeypatch.setattr(strangers, "SILENT_S", 0.0)
        events = until(syncer, lambda _: len(syncer._connections.open) == 2)
        assert any("no message of this protocol within" in r for r in reasons(events))
        unharmed(syncer, learner)


def test_who_sends_nonsense_again_and_again_is_closed():
    with connected() as (syncer, learner):
        nonsense = wire(seal(b"\x81\xa4type\xa3Odd"))
        say(syncer.port, identity(3), *[nonsense] * (MOST_ODD + 5))  # fewer than its queue
        events = until(syncer, count(Malformed, MOST_ODD))
        events += until(syncer, lambda _: len(syncer._sessions) == 1)
        assert MOST_ODD <= len(reasons(events)) <= MOST_ODD + 5
        unharmed(syncer, learner)


def test_the_kernel_tells_what_a_connection_has_received():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as far,
    ):
        near, _ = listener.accept()
        descriptor = near.fileno()
        with near:
            far.sendall(bytes(1000))
            assert near.recv(1000, socket.MSG_WAITALL) == bytes(1000)
            assert bytes_received(descriptor) == 1000
        assert bytes_received(descriptor) is None
