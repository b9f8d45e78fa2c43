"""The encrypted channel: who gets in, who does not, what each end then says, and that it is one."""

import contextlib
import os
import socket
import threading

import pytest

from dd_lightning.protocol.messages import PROTOCOL_VERSION, Answer
from dd_lightning.transport.frames import Arrival, Malformed
from dd_lightning.transport.keys import (
    LEARNER,
    OPERATOR,
    SYNCER_FILE,
    add_keys,
    key_file,
    load_dial_keys,
    load_syncer_keys,
    new_keys,
)
from dd_lightning.transport.learner_channel import KeyRefused, LearnerChannel
from dd_lightning.transport.operator_channel import OperatorChannel, OperatorError
from dd_lightning.transport.rendezvous import Rendezvous
from dd_lightning.transport.syncer_channel import SyncerChannel
from tests.transport_samples import (
    BOUND_S,
    MOST_BYTES,
    both_bound,
    contribution,
    count,
    fragment,
    from_learner,
    from_syncer,
    goodbye,
    open_descriptors,
    until,
)

pytestmark = pytest.mark.integration
UNSAID = "closed in the handshake, as a learner without a key does"
SHORT_S = 1.0  # a handshake that is never answered


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ours")
    new_keys(folder, ["0"], "operator")
    return folder


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Keys of another run."""
    folder = tmp_path_factory.mktemp("theirs")
    new_keys(folder, ["0"], "operator")
    return folder


def learner_keys(folder, name="0"):
    return load_dial_keys(key_file(folder, LEARNER, name))


def listen(folder, **options):
    keys = load_syncer_keys(folder / SYNCER_FILE, folder) if folder is not None else None
    return SyncerChannel("127.0.0.1", max_message_bytes=MOST_BYTES, keys=keys, **options)


def refused(events):
    """Why; the second of two connections may be closed before it has said anything."""
    return {event.reason for event in events if isinstance(event, Malformed)}


class Dialing:
    """Dials in a thread, as a learner does, while the test polls the syncer's channel."""

    def __init__(self, port, keys, hint="", timeout_s=BOUND_S):
        rendezvous = Rendezvous("127.0.0.1", port, "run", PROTOCOL_VERSION, hint)
        self.channel = self.error = None

        def dial():
            try:
                self.channel = LearnerChannel(
                    rendezvous,
                    max_message_bytes=MOST_BYTES,
                    connect_timeout_s=timeout_s,
                    keys=keys,
                )
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=dial, daemon=True)
        self.thread.start()

    @property
    def done(self):
        return not self.thread.is_alive()


@pytest.fixture
def connect():
    """Dials and polls until both are through; closes what came about."""
    opened = []

    def through(syncer, keys, expected=frozenset({UNSAID}), **options):
        dialing = Dialing(syncer.port, keys, **options)
        events = until(syncer, lambda _: dialing.done)
        if dialing.channel is not None:
            opened.append(dialing.channel)
            until(syncer, lambda _: both_bound(syncer, dialing.channel))
            return dialing.channel
        events += until(syncer, lambda more: refused(events + more) - expected)
        return dialing.error, refused(events)

    yield through
    for channel in opened:
        channel.close()


@pytest.fixture
def syncer(ours):
    channel = listen(ours)
    yield channel
    channel.close()


def test_every_message_arrives_and_both_ends_count_the_same_bytes(ours, syncer, connect):
    data = os.urandom(100_000)
    learner = connect(syncer, learner_keys(ours))
    for message, payload in from_learner(data):
        assert learner.send(message, payload)
        (event,) = until(syncer, count(Arrival, 1))
        assert (event.message, event.payload) == (message, payload)
        if payload is not None:
            until(learner, lambda _: learner.can_upload())
    for message, payload in from_syncer(data):
        assert syncer.send(learner.session, message, payload)
        (event,) = until(learner, count(Arrival, 1))
        assert (event.message, event.payload) == (message, payload)
    assert syncer.wire_bytes(learner.session) == learner.wire_bytes()


@pytest.fixture
def relay():
    """Starts a relay to a port that keeps what passes, up and down; returns its port and those."""
    with contextlib.ExitStack() as close:
        threads = []

        def pass_on(source, target, record):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    record += data
                    target.sendall(data)
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

        def start(port):
            listener = close.enter_context(socket.create_server(("127.0.0.1", 0)))
            seen = bytearray(), bytearray()

            def run():
                for _ in range(2):  # control and data
                    near = close.enter_context(listener.accept()[0])
                    far = close.enter_context(socket.create_connection(("127.0.0.1", port)))
                    for arguments in ((near, far, seen[0]), (far, near, seen[1])):
                        threads.append(threading.Thread(target=pass_on, args=arguments))
                        threads[-1].start()

            accepting = threading.Thread(target=run)
            threads.append(accepting)
            accepting.start()
            return listener.getsockname()[1], seen

        yield start
        for thread in threads:
            thread.join(BOUND_S)


def test_what_is_on_the_wire_is_counted_and_cannot_be_read(ours, syncer, relay):
    data = b"a secret of the run " * 500
    port, seen = relay(syncer.port)
    dialing = Dialing(port, learner_keys(ours))
    until(syncer, lambda _: dialing.done)
    learner = dialing.channel
    until(syncer, lambda _: both_bound(syncer, learner))
    before = [len(part) for part in seen], learner.wire_bytes()
    assert learner.send(contribution(data), data)
    until(syncer, count(Arrival, 1))
    assert syncer.send(learner.session, fragment(data), data)
    until(learner, count(Arrival, 1))
    grown = [len(part) - start for part, start in zip(seen, before[0], strict=True)]
    counted = [now - start for now, start in zip(learner.wire_bytes(), before[1], strict=True)]
    learner.close()
    assert not any(b"secret" in part or b"fingerprint" in part for part in seen)
    assert grown == counted


def test_a_key_that_is_not_on_the_list_is_told_so_at_once(theirs, ours, syncer, connect):
    mine = learner_keys(theirs)
    stranger = type(mine)("learner", "x", mine.public, mine.secret, syncer_public(ours), "x.key")
    error, reasons = connect(syncer, stranger)
    assert isinstance(error, KeyRefused) and isinstance(error, ConnectionError)
    for said in ("x.key", mine.public.decode(), "keys add"):
        assert said in str(error)
    assert {f"its key {mine.public.decode()} is not on the allow-list"} == reasons - {UNSAID}
    assert not syncer._sessions


def syncer_public(folder):
    return load_syncer_keys(folder / SYNCER_FILE, folder).public


def test_a_key_for_another_syncer(ours, theirs, syncer, connect):
    hint = load_syncer_keys(ours / SYNCER_FILE, ours).fingerprint
    error, reasons = connect(syncer, learner_keys(theirs), hint=hint)
    assert learner_keys(theirs).fingerprint in str(error) and hint in str(error)
    assert "Take the key file" in str(error)
    assert reasons - {UNSAID} == {"it dials with another syncer's public key"}
    assert not syncer._sessions


def test_a_learner_without_a_key(ours, syncer, connect):
    # either end may be the first to see that the other's greeting names another mechanism
    error, reasons = connect(syncer, None, expected=frozenset(), hint="ab" * 8)
    assert "asks for a key" in str(error) and "DD_KEY" in str(error)
    assert reasons <= {"it has no key (--key, DD_KEY)", UNSAID}
    assert not syncer._sessions


def test_a_learner_with_a_key_never_talks_to_a_syncer_without(ours):
    plain = listen(None)
    dialing = Dialing(plain.port, learner_keys(ours), timeout_s=SHORT_S)
    until(plain, lambda _: dialing.done)
    assert dialing.channel is None
    assert "says it has none" in str(dialing.error)
    assert not plain._sessions
    plain.close()


def test_a_strangers_hint_in_the_store_changes_nothing(ours, syncer, connect):
    learner = connect(syncer, learner_keys(ours), hint="0" * 16)
    assert learner.send(goodbye())
    until(syncer, count(Arrival, 1))


def test_an_operator_asks_with_its_own_key(ours, theirs, syncer):
    answers = []

    def ask(keys):
        rendezvous = Rendezvous("127.0.0.1", syncer.port, "run", PROTOCOL_VERSION, "ab" * 8)
        try:
            channel = OperatorChannel(rendezvous, keys=keys)
            answers.append(channel.ask("status", BOUND_S))
            channel.close()
        except OperatorError as error:
            answers.append(str(error))

    operator = load_dial_keys(key_file(ours, OPERATOR, "operator"))
    asking = threading.Thread(target=ask, args=(operator,))
    asking.start()
    (event,) = until(syncer, count(Arrival, 1))
    assert syncer.send(event.session, Answer(number=event.message.number, body={"merges": 3}))
    until(syncer, lambda _: answers)
    asking.join(BOUND_S)
    for keys in (None, learner_keys(theirs)):
        asking = threading.Thread(target=ask, args=(keys,))
        asking.start()
        until(syncer, lambda _: not asking.is_alive())  # noqa: B023
    assert answers[0] == {"merges": 3}
    assert "--key to an operator's key file" in answers[1]
    assert "made with that syncer's" in answers[2]


def test_raw_bytes_do_not_get_past_the_greeting(ours, syncer, connect):
    for garbage in (b"GET / HTTP/1.0\r\n\r\n", b"\x05\x00abcd\x05\x00abcd", b"\xff" * 64):
        with socket.create_connection(("127.0.0.1", syncer.port)) as stranger:
            stranger.sendall(garbage)
        until(syncer, count(Malformed, 1))
    assert not syncer._sessions
    assert connect(syncer, learner_keys(ours)).send(goodbye())


def test_the_list_is_read_again_when_it_has_changed(tmp_path, connect, caplog):
    new_keys(tmp_path, ["0"], "operator")
    syncer = listen(tmp_path)
    add_keys(tmp_path, ["1"])
    connect(syncer, learner_keys(tmp_path, "1"))
    allowed = tmp_path / "allowed.yaml"
    text = allowed.read_text()
    allowed.write_text("no list")
    connect(syncer, learner_keys(tmp_path, "1"))
    assert "the allow-list stays as it was" in caplog.text
    allowed.write_text(text.replace(learner_keys(tmp_path, "1").public.decode(),
                                    learner_keys(tmp_path, "0").syncer.decode()))  # fmt: skip
    error, _ = connect(syncer, learner_keys(tmp_path, "1"))
    assert isinstance(error, KeyRefused)
    syncer.close()


def test_refused_handshakes_leave_nothing_behind(ours, theirs, connect):
    before = open_descriptors()
    syncer = listen(ours)
    for _ in range(20):
        connect(syncer, learner_keys(theirs))
        connect(syncer, None, expected=frozenset())
    assert not (syncer._sessions or syncer._ended or syncer._connections._open)
    syncer.close()
    assert open_descriptors() == before
