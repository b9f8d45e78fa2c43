"""The encrypted port beside a run: plaintext, wrong keys, and a right key with nonsense only.

Each is refused and counted; the result is bitwise that of a run without.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading

import pytest
import zmq

from dd_lightning.commands.asking import Asker
from dd_lightning.protocol.messages import encode, seal
from dd_lightning.transport.curve import secure_dialer
from dd_lightning.transport.frames import identity_of
from dd_lightning.transport.keys import (
    LEARNER,
    OPERATOR,
    SYNCER_FILE,
    DialKeys,
    key_file,
    load_dial_keys,
    new_keys,
)
from dd_lightning.transport.rendezvous import lookup
from dd_lightning.transport.syncer_channel import MOST_ODD
from dd_lightning.transport.wiring import FAILED, Monitor
from tests import fuzzing
from tests.diloco_reference import reference
from tests.pacing import Gate, Paced, train
from tests.syncer_process import END_S, Syncer
from tests.trainers import Regression, assert_equal, loader, run_threads, values
from tests.transport_samples import from_learner

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
STEPS, SYNC_EVERY, PARTS = 60, 4, 40
SETTINGS = ("learners=2", "algorithm=diloco", f"algorithm.sync_every={SYNC_EVERY}",
            "algorithm.outer.lr=0.7", "algorithm.outer.momentum=0.9")  # fmt: skip
ENDS = zmq.Event.DISCONNECTED | FAILED


class Strangers:
    """Who dials the encrypted port; `refused` counts what the syncer is to count."""

    def __init__(self, context: zmq.Context, port: int, keys: DialKeys) -> None:
        self.context, self.port, self.keys = context, port, keys
        self.random = random.Random(5)
        self.headers = [encode(message) for message, _ in from_learner(b"x")]
        self.refused = 0
        self.waiting: list[tuple[zmq.Socket, Monitor]] = []

    def part(self) -> None:
        """One of each kind."""
        self.plaintext()
        self.by_hand()
        public, secret = zmq.curve_keypair()
        other_syncer, _ = zmq.curve_keypair()
        mine = self.keys
        self.say(DialKeys(LEARNER, "x", public, secret, mine.syncer), self.headers[0])
        self.say(DialKeys(LEARNER, "x", mine.public, mine.secret, other_syncer), self.headers[0])
        self.say(mine, *(self.nonsense() for _ in range(MOST_ODD)))
        damaged = bytearray(self.random.choice(self.headers))
        damaged[self.random.randrange(len(damaged))] ^= 1
        self.say(mine, bytes(damaged))

    def plaintext(self) -> None:
        """Bytes that are no greeting, and a peer without a key."""
        with socket.create_connection(("127.0.0.1", self.port)) as raw:
            raw.sendall(self.random.choice(fuzzing.RAW))
        with pytest.raises(ConnectionError):
            fuzzing.say(self.port, self.identity(), fuzzing.wire(self.headers[0]))
        self.refused += 2

    def by_hand(self) -> None:
        """The right mechanism, then a box that none of the syncer's keys opens."""
        raw = socket.create_connection(("127.0.0.1", self.port))
        hello = b"\x05HELLO\x01\x00" + self.random.randbytes(192)
        raw.sendall(fuzzing.SECURE_GREETING + fuzzing.frame(hello, fuzzing.COMMAND))
        fuzzing.hang_up(raw)
        self.refused += 1

    def say(self, keys: DialKeys, *headers: bytes) -> None:
        """Dials with these keys and sends; its end comes from the syncer."""
        stranger = self.context.socket(zmq.DEALER)
        secure_dialer(stranger, keys)
        stranger.setsockopt(zmq.IDENTITY, self.identity())
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        self.waiting.append((stranger, Monitor(self.context, stranger, ENDS)))
        stranger.connect(f"tcp://127.0.0.1:{self.port}")
        for header in headers:
            with contextlib.suppress(zmq.Again):  # one with a wrong key may be refused by now
                stranger.send(header, zmq.NOBLOCK)
        self.refused += len(headers)

    def nonsense(self) -> bytes:
        """Of the right form by somebody who never joined, or no message under a right checksum."""
        if self.random.random() < 0.5:
            return encode(fuzzing.message(self.random, fuzzing.STRANGERS[1:]))  # no Join
        return seal(b"\xc1" + self.random.randbytes(self.random.randrange(100)))

    def identity(self) -> bytes:
        return identity_of(b"c", self.random.randbytes(16).hex())

    def wait_until_refused(self) -> None:
        """All of them."""
        for stranger, monitor in self.waiting:
            assert monitor.socket.poll(1000 * END_S)
            monitor.close()
            stranger.close(linger=0)


def test_the_result_is_unchanged_and_all_is_counted(tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    new_keys(keys, ["0", "1", "x"], OPERATOR)
    syncer = Syncer(tmp_path / "run", *SETTINGS, "--key", str(keys / SYNCER_FILE),
                    "--allow", str(keys))  # fmt: skip
    gate, barrier, asked = Gate(PARTS), threading.Barrier(2), []
    ours = [Regression(7), Regression(7)]

    def learn(index):
        key = str(key_file(keys, LEARNER, str(index)))
        train(ours[index], index, STEPS, syncer.address, Paced(barrier, gate), key=key)

    def attack():
        gate.wait_until_training()
        port = lookup(syncer.address, END_S).channel_port
        operator = key_file(keys, OPERATOR, OPERATOR)
        context = zmq.Context()
        try:
            with Asker(syncer.address, END_S, operator) as asker:
                strangers = Strangers(context, port, load_dial_keys(key_file(keys, LEARNER, "x")))
                asked.append(asker.ask("status"))
                for part in range(PARTS):
                    strangers.part()
                    if part < PARTS - 1:
                        gate.open()
                strangers.wait_until_refused()
                asked.extend([asker.ask("status"), strangers.refused])
        finally:
            gate.open_all()
            context.destroy(linger=0)

    try:
        run_threads(lambda: learn(0), lambda: learn(1), attack)
        assert syncer.end(END_S) == 0
    finally:
        syncer.kill()
    copies = [Regression(7), Regression(7)]
    reference(copies, [loader(0), loader(1)], STEPS, SYNC_EVERY, 1, 0)
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    before, after, expected = asked
    refused = sum(after[name] - before[name] for name in ("malformed", "refusals"))
    assert refused >= expected
    assert sorted(after["learners"]) == ["0", "1"]
