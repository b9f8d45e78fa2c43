"""A stranger's bytes on the channel's port: counted, without effect on anybody else."""

import random
import socket

import pytest
import zmq

from dd_lightning.protocol.messages import encode, seal
from dd_lightning.transport.frames import (
    MAX_HEADER_BYTES,
    Arrival,
    Disconnected,
    Malformed,
    identity_of,
)
from dd_lightning.transport.wiring import Monitor
from tests.transport_samples import BOUND_S, connected, count, goodbye, until

pytestmark = pytest.mark.integration


@pytest.fixture
def context():
    with zmq.Context() as context:
        context.setsockopt(zmq.LINGER, 0)
        yield context
        context.destroy(linger=0)


def unharmed(syncer, learner):
    assert learner.send(goodbye("unharmed"))
    events = until(syncer, count(Arrival, 1))
    assert [e.session for e in events if isinstance(e, Arrival)] == [learner.session]
    assert not any(isinstance(e, Disconnected) for e in events)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff" * 64,
        b"\x00" * 64,
        random.Random(0).randbytes(4096),
        b"\x05\x00abcd\x05\x00abcd",  # ZMTP 1.0: an identity and a message
        b"",
    ],
    ids=["http", "ones", "zeros", "random", "zmtp1", "nothing"],
)
def test_bytes_that_are_no_greeting(garbage):
    with connected() as (syncer, learner):
        with socket.create_connection(("127.0.0.1", syncer.port)) as stranger:
            peer = f"127.0.0.1:{stranger.getsockname()[1]}"
            accepted = syncer._connections._open
            until(syncer, lambda _: any(c.peer == peer for c in accepted.values()))
            stranger.sendall(garbage)
        events = until(syncer, count(Malformed, 1))
        # ZMTP 1.0 is what random bytes may look like; the library does not tell where from
        assert {e.peer for e in events} <= {peer, "a stranger"}
        unharmed(syncer, learner)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_foreign_peer_is_counted_and_closed(context, kind):
    with connected() as (syncer, learner), context.socket(kind) as stranger:
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = Monitor(context, stranger, zmq.Event.DISCONNECTED)
        stranger.connect(f"tcp://127.0.0.1:{syncer.port}")
        stranger.send(b"hello")
        (event,) = until(syncer, count(Malformed, 1))
        assert "no learner of this version" in event.reason
        assert monitor.socket.poll(1000 * BOUND_S)
        monitor.close()
        unharmed(syncer, learner)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([seal(b"\xc1")], "malformed"),
        ([b"a", b"b", b"c"], "3 frames"),
        ([bytes(MAX_HEADER_BYTES + 1)], "a header of"),
    ],
)
def test_nonsense_in_a_session_is_counted_and_the_session_lives(context, parts, reason):
    with connected(most_bytes=8 << 20) as (syncer, learner), context.socket(zmq.DEALER) as odd:
        session = "ab" * 16
        odd.setsockopt(zmq.IDENTITY, identity_of(b"c", session))
        odd.connect(f"tcp://127.0.0.1:{syncer.port}")
        odd.send_multipart(parts)
        (event,) = until(syncer, count(Malformed, 1))
        assert event.peer == session and reason in event.reason
        unharmed(syncer, learner)


def test_a_header_that_changed_on_its_way_is_counted_and_ends_its_own_session(context):
    with connected() as (syncer, learner), context.socket(zmq.DEALER) as odd:
        session = "ef" * 16
        odd.setsockopt(zmq.IDENTITY, identity_of(b"c", session))
        odd.connect(f"tcp://127.0.0.1:{syncer.port}")
        header = bytearray(encode(goodbye()))
        header[3] ^= 1
        odd.send(bytes(header))
        malformed, ended = until(syncer, count(Disconnected, 1))
        assert malformed == Malformed(session, ended.reason) and "checksum" in ended.reason
        assert ended.session == session
        unharmed(syncer, learner)


def test_an_oversized_message_closes_its_own_session_only(context):
    with connected(most_bytes=1 << 20) as (syncer, learner), context.socket(zmq.DEALER) as odd:
        session = "cd" * 16
        odd.setsockopt(zmq.IDENTITY, identity_of(b"d", session))
        odd.setsockopt(zmq.RECONNECT_IVL, -1)
        odd.connect(f"tcp://127.0.0.1:{syncer.port}")
        odd.send(b"")
        until(syncer, lambda _: session in syncer._sessions)
        odd.send_multipart([b"header", bytes(MAX_HEADER_BYTES + 1)])
        (event,) = until(syncer, count(Disconnected, 1))
        assert event.session == session
        unharmed(syncer, learner)


def test_a_learner_leaves_a_server_that_is_no_syncer(context):
    with connected() as (syncer, learner):
        identity = identity_of(b"c", learner.session)
        syncer._router.send_multipart([identity, b"\xc1 no message"])
        (event,) = until(learner, count(Disconnected, 1))
        assert "no syncer of this version" in event.reason
        assert not learner.send(goodbye())
