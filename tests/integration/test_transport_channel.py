"""Both ends of the channel over loopback: delivery, back-pressure, and how a session ends."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from dd_lightning.protocol.messages import FinishNow
from dd_lightning.transport.connections import shut_down
from dd_lightning.transport.frames import SILENCE_S, Arrival, Disconnected
from dd_lightning.transport.learner_channel import ChannelError, LearnerChannel
from dd_lightning.transport.rendezvous import Rendezvous
from dd_lightning.transport.syncer_channel import SEND_QUEUE, SyncerChannel
from tests.transport_samples import (
    BOUND_S,
    both_bound,
    connected,
    contribution,
    count,
    dial,
    fragment,
    free_port,
    from_learner,
    from_syncer,
    goodbye,
    open_descriptors,
    silent_port,
    until,
)

pytestmark = pytest.mark.integration

LEARNER = """
import sys, time
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import Rendezvous
from tests.transport_samples import goodbye
channel = LearnerChannel(Rendezvous("127.0.0.1", int(sys.argv[1]), "run", 1, ""),
                         max_message_bytes=1 << 20)
channel.send(goodbye("here"))
time.sleep(600)
"""
ONE_CLOSE_S = 0.6 * SILENCE_S  # what the heartbeat would need; one close is enough
KNOWN_DEAD_S = 1.0
ATTEMPTS = 3  # a busy machine makes times longer, never shorter


def test_every_message_arrives_as_sent():
    data = os.urandom(100_000)
    with connected() as (syncer, learner):
        for message, payload in from_learner(data):
            assert learner.send(message, payload)
            (event,) = until(syncer, count(Arrival, 1))
            assert event.session == learner.session
            assert event.message == message
            assert event.payload == payload
            if payload is not None:
                until(learner, lambda _: learner.can_upload())
        for message, payload in from_syncer(data):
            assert syncer.send(learner.session, message, payload)
            (event,) = until(learner, count(Arrival, 1))
            assert event.message == message
            assert event.payload == payload
        assert syncer.peer_address(learner.session) == "127.0.0.1"


def test_both_ends_count_the_same_bytes():
    data = os.urandom(1000)
    with connected() as (syncer, learner):
        learner.send(contribution(data), data)
        (event,) = until(syncer, count(Arrival, 1))
        syncer.send(learner.session, fragment(data), data)
        until(learner, count(Arrival, 1))
        up, down = learner.wire_bytes()
        assert syncer.wire_bytes(learner.session) == (up, down)
        assert up == event.num_bytes + 2 * 2  # two greetings
        assert down > len(data)
        session = learner.session
        learner.close()
        until(syncer, count(Disconnected, 1))
        assert syncer.wire_bytes(session) == (up, down)
        with pytest.raises(KeyError, match="no session"):
            syncer.wire_bytes("00" * 16)


def test_a_long_payload_arrives_bit_for_bit_and_delays_no_control_message():
    data = memoryview(bytearray(os.urandom(64 << 20)))
    with connected() as (syncer, learner):
        assert learner.send(contribution(data), data)
        assert not learner.can_upload()
        assert not learner.send(contribution(data), data)
        for i in range(20):
            assert learner.send(goodbye(str(i)))
        events = until(syncer, count(Arrival, 21))
        # the payload was sent first, and yet it comes behind small messages
        assert events[0].message == goodbye("0")
        assert [e.message.reason for e in events if e.payload is None] == [
            str(i) for i in range(20)
        ]
        (long,) = [e for e in events if e.payload is not None]
        assert long.payload == data
        until(learner, lambda _: learner.can_upload())


def test_a_learner_that_does_not_read_costs_a_bound():
    data = memoryview(bytearray(32 << 20))
    with connected() as (syncer, learner):
        session = learner.session
        taken = 0
        for _ in range(100):
            taken += syncer.send(session, fragment(data), data)
            syncer.poll(0.005)
        # one on its way, the others in the receiver's own queue and in the kernel
        assert 1 <= taken <= 4
        message = FinishNow(generation=1, reason="x" * 1000)
        limit = 100_000  # the kernel's buffers take some of these
        accepted = refused = 0
        while accepted < limit and refused < 50:
            # after a refusal the library's thread may still move some on to the kernel
            if syncer.send(session, message):
                accepted, refused = accepted + 1, 0
            else:
                refused += 1
                syncer.poll(0.005)
        assert SEND_QUEUE <= accepted < limit
        assert session in syncer._sessions  # refused because full, not because it ended
        # and somebody else is served meanwhile
        other = dial(syncer)
        until(syncer, lambda _: both_bound(syncer, other))
        assert syncer.send(other.session, message)
        assert until(other, count(Arrival, 1))[0].message == message
        other.close()


def test_poll_returns_when_a_refused_payload_can_be_sent():
    data = memoryview(bytearray(32 << 20))
    with connected() as (syncer, learner):
        assert syncer.send(learner.session, fragment(data), data)
        assert not syncer.send(learner.session, fragment(data), data)
        reader = threading.Thread(target=until, args=(learner, count(Arrival, 1)))
        reader.start()
        begin = time.monotonic()
        assert syncer.poll(BOUND_S) == []
        assert time.monotonic() - begin < BOUND_S  # it was not the timeout that ended it
        reader.join(BOUND_S)
        assert syncer.send(learner.session, fragment(data), data)


def test_a_syncer_that_does_not_read_blocks_no_learner():
    data = bytearray(1 << 20)
    with connected() as (_, learner):
        accepted = 0
        while accepted < 1_000_000 and learner.send(goodbye("x" * 1000)):
            accepted += 1
        assert 0 < accepted < 1_000_000
        assert learner.send(contribution(data), data)


def test_a_killed_learner_is_known_dead_within_a_second():
    assert any(seconds_until_known_dead() < KNOWN_DEAD_S for _ in range(ATTEMPTS))


def seconds_until_known_dead():
    """From the SIGKILL of a learner's process to the end of its session."""
    syncer = SyncerChannel("127.0.0.1", max_message_bytes=1 << 20)
    process = subprocess.Popen([sys.executable, "-c", LEARNER, str(syncer.port)])
    try:
        (arrival,) = until(syncer, count(Arrival, 1))
        killed = time.monotonic()
        process.send_signal(signal.SIGKILL)
        (event,) = syncer.poll(ONE_CLOSE_S)
        took = time.monotonic() - killed
        assert event == Disconnected(arrival.session, event.reason)
        assert not syncer.send(arrival.session, goodbye())
        assert syncer.poll(0.0) == []
        return took
    finally:
        process.kill()
        process.wait(BOUND_S)
        syncer.close()


def test_a_goodbye_arrives_before_its_disconnect():
    with connected() as (syncer, learner):
        session = learner.session
        learner.send(goodbye())
        learner.close()
        events = until(syncer, count(Disconnected, 1))
        assert events[0].message == goodbye()
        assert [type(e) for e in events] == [Arrival, Disconnected]
        assert events[1].session == session


@pytest.mark.parametrize(("role", "name"), [(b"c", "control"), (b"d", "data")])
def test_the_end_of_either_connection_ends_both(role, name):
    with connected() as (syncer, learner):
        connections = dict(syncer._sessions[learner.session].connections)
        shut_down(connections[role])  # as a network or a proxy would
        (event,) = until(syncer, count(Disconnected, 1))
        assert event.session == learner.session and name in event.reason
        assert not syncer.send(learner.session, goodbye())
        (event,) = until(learner, count(Disconnected, 1))
        assert event.session == learner.session and name in event.reason
        assert not learner.send(goodbye())
        assert not learner.can_upload()
        assert until(syncer, lambda _: all(c.closed for c in connections.values())) == []
        assert learner.poll(0.0) == []


def ended(syncer, events):
    syncer.poll(0.0)  # which carries out the close
    return any(isinstance(event, Disconnected) for event in events)


def test_reconnects_use_descriptors_again_and_are_told_apart():
    with connected() as (syncer, stays):
        descriptors = []
        for i in range(10):
            learner = dial(syncer)
            learner.send(goodbye(str(i)))
            learner.close()  # at once: its frames may be read after the descriptors are reused
            following = dial(syncer)
            following.send(goodbye("next"))
            events = until(
                syncer,
                lambda e, s=following.session: (
                    count(Disconnected, 1)(e) and any(x.session == s for x in e)
                ),
            )
            gone = [e.session for e in events if isinstance(e, Disconnected)]
            assert gone == [learner.session]
            until(syncer, lambda _, f=following: both_bound(syncer, f))
            bound = syncer._sessions[following.session].connections.values()
            descriptors += [connection.fd for connection in bound]
            following.close()
            (event,) = until(syncer, count(Disconnected, 1))
            assert event.session == following.session
        assert len(set(descriptors)) < len(descriptors)
        assert stays.send(goodbye("still here"))
        assert until(syncer, count(Arrival, 1))[0].session == stays.session


def test_closing_a_session_lets_the_last_message_through():
    with connected() as (syncer, learner):
        assert syncer.send(learner.session, from_syncer(b"")[1][0])
        syncer.close_session(learner.session)
        assert not syncer.send(learner.session, goodbye())
        events = until(learner, lambda events: ended(syncer, events))
        assert [type(e) for e in events] == [Arrival, Disconnected]
        learner.send(goodbye("ignored"))
        assert syncer.poll(0.0) == []


def test_the_end_of_the_syncer_is_seen_at_once():
    with connected() as (syncer, learner):
        syncer.close()
        (event,) = learner.poll(ONE_CLOSE_S)
        assert isinstance(event, Disconnected)


def test_wake_ends_a_poll_from_another_thread():
    with connected() as (syncer, learner):
        for channel in (syncer, learner):
            waker = threading.Thread(target=channel.wake)
            waker.start()
            begin = time.monotonic()
            assert channel.poll(BOUND_S) == []
            assert time.monotonic() - begin < BOUND_S  # it was not the timeout that ended it
            waker.join(BOUND_S)
            for _ in range(100_000):
                channel.wake()  # never blocks, however many
            channel.poll(0.0)
        learner.close()
        learner.wake()  # after the end: nothing


def test_connecting_is_bounded_and_names_the_cause():
    def connect(port):
        rendezvous = Rendezvous("127.0.0.1", port, "run", 1, "")
        LearnerChannel(rendezvous, max_message_bytes=1, connect_timeout_s=2.0)

    closed = free_port()
    with pytest.raises(ChannelError, match=f"127.0.0.1:{closed}: the connection was refused"):
        connect(closed)
    with silent_port() as silent:
        cause = f"127.0.0.1:{silent}: the connection was accepted"
        with pytest.raises(ChannelError, match=cause):
            connect(silent)


def test_a_taken_port_and_an_open_host():
    with connected() as (syncer, _):
        with pytest.raises(ValueError, match=f"port {syncer.port}.*Give a free port"):
            SyncerChannel("127.0.0.1", syncer.port, max_message_bytes=1)
        with pytest.raises(ValueError, match="insecure: true"):
            SyncerChannel("0.0.0.0", max_message_bytes=1)


def test_nothing_is_left_after_close():
    with connected():
        pass  # what the library makes once per process exists now
    before, threads = open_descriptors(), threading.active_count()
    for _ in range(3):
        with connected() as (syncer, learner):
            learner.send(contribution(b"12"), b"12")
            until(syncer, count(Arrival, 1))
    assert open_descriptors() == before
    assert threading.active_count() <= threads + 1  # pyzmq's own, one per process
