"""Ten thousand messages of nonsense while two learners train: bitwise the result of none.

The syncer is a process of its own, so that its memory and descriptors can be looked at.
"""

from __future__ import annotations

import json
import os
import random
import socket
import threading
from pathlib import Path

import pytest

from dd_lightning.commands.asking import Asker
from dd_lightning.protocol.messages import Join, encode, seal
from dd_lightning.protocol.tape import read_tape
from dd_lightning.transport.frames import MAX_HEADER_BYTES, identity_of
from dd_lightning.transport.rendezvous import lookup
from dd_lightning.transport.store_server import resident_bytes
from dd_lightning.transport.syncer_channel import MOST_ODD
from tests import fuzzing
from tests.diloco_reference import reference
from tests.pacing import Gate, Paced, train
from tests.syncer_process import END_S, Syncer, until
from tests.trainers import WAIT_S, Regression, assert_equal, loader, values
from tests.transport_samples import from_learner

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
STEPS, SYNC_EVERY, PARTS = 120, 4, 100
MESSAGES = 10_000
A_SESSION = MOST_ODD // 2  # messages, so that none is cut off
MOST_GROWTH_BYTES = 64 << 20
STORE_BYTES = 200 << 20  # written by a stranger, less than the store is ended at
SETTINGS = ("learners=2", "algorithm=diloco", f"algorithm.sync_every={SYNC_EVERY}",
            "algorithm.outer.lr=0.7", "algorithm.outer.momentum=0.9")  # fmt: skip


class Nonsense:
    """Sends it; `strange` counts the messages that were refused one by one."""

    def __init__(self, port):
        self.random = random.Random(3)
        self.port = port
        self.strange = 0
        self.headers = [encode(message) for message, _ in from_learner(b"x")]

    def identity(self, role=b"c"):
        return identity_of(role, self.random.randbytes(16).hex())

    def part(self, count):
        """So many: of the right form by somebody who never joined, damaged, no messages at all."""
        draw = self.random
        for _ in range(count // 2 // A_SESSION):
            said = [self.well_formed() for _ in range(A_SESSION)]
            fuzzing.say(self.port, self.identity(), *said, dials=3)
            self.strange += len(said)
        for _ in range(count // 2 // 5):
            header = draw.choice(self.headers)
            damaged = fuzzing.mutated(draw, header)
            sealed = [seal(fuzzing.mutated(draw, header[:-4])) for _ in range(3)]
            frames = [draw.randbytes(draw.randrange(40)) for _ in range(draw.randrange(3, 6))]
            said = [*map(fuzzing.wire, sealed), fuzzing.wire(*frames), fuzzing.wire(damaged)]
            fuzzing.say(self.port, self.identity(draw.choice((b"c", b"d"))), *said)
            self.strange += 4 + (damaged != header)
        with socket.create_connection(("127.0.0.1", self.port)) as raw:
            raw.sendall(draw.choice((*fuzzing.RAW, draw.randbytes(500))))

    def well_formed(self):
        """A random message, or a real one under an identity that has not joined."""
        message = fuzzing.message(self.random, fuzzing.STRANGERS)
        if isinstance(message, Join):  # under a learner's id too; of no model that fits
            message = fuzzing.struct(self.random, Join, learner=self.random.choice("01x"))
        return fuzzing.wire(encode(message))

    def few(self):
        """What is large or many: once is enough."""
        oversized = fuzzing.wire(bytes(MAX_HEADER_BYTES + 1))
        fuzzing.say(self.port, self.identity(), oversized)
        for identity in (b"", b"short", self.identity() + b"long"):
            fuzzing.say(self.port, identity, fuzzing.wire(self.headers[0]))
        crowd = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(200)]
        for connection in crowd:
            connection.close()


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def store_nonsense(address, draw):
    """Garbage, large values, and our own keys overwritten and deleted, by a stranger."""
    from torch.distributed import TCPStore

    host, _, port = address.removeprefix("tcp://").rpartition(":")
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    garbage = draw.randbytes(1 << 20)
    for number in range(STORE_BYTES >> 20):
        store.set(f"garbage {number}", garbage)
    for key in ("dd/channel_port", "dd/run_id", "dd/protocol"):
        store.set(key, "65536000")
        store.delete_key(key)


def children_of(pid):
    """Processes that it started: the store."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_result_is_unchanged_and_nothing_grows(tmp_path):
    syncer = Syncer(tmp_path / "run", *SETTINGS)
    pid, gate, barrier, errors = syncer.process.pid, Gate(PARTS), threading.Barrier(2), []
    ours = [Regression(7), Regression(7)]

    def learn(index):
        try:
            train(ours[index], index, STEPS, syncer.address, Paced(barrier, gate))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=learn, args=(index,)) for index in range(2)]
    try:
        for thread in threads:
            thread.start()
        gate.wait_until_training()
        nonsense = Nonsense(lookup(syncer.address, END_S).channel_port)
        with Asker(syncer.address, END_S) as asker:
            before = asker.ask("status")
            start = descriptors(pid), resident_bytes(pid)
            nonsense.few()
            for part in range(PARTS):
                nonsense.part(MESSAGES // PARTS)
                if part == PARTS // 2:
                    held = resident_bytes(pid)
                    store_nonsense(syncer.address, nonsense.random)
                    by_store = resident_bytes(pid) - held
                    stores = [resident_bytes(child) for child in children_of(pid)]
                if part < PARTS - 1:
                    gate.open()
            until(lambda: descriptors(pid) <= start[0])
            after = asker.ask("status")
            grown = resident_bytes(pid) - start[1]
        gate.open()
        for thread in threads:
            thread.join(1.5 * WAIT_S)
            assert not thread.is_alive()
        assert not errors
        assert syncer.end(END_S) == 0
    finally:
        gate.open_all()
        syncer.kill()
    copies = [Regression(7), Regression(7)]
    reference(copies, [loader(0), loader(1)], STEPS, SYNC_EVERY, 1, 0)
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    refused = sum(after[k] - before[k] for k in ("malformed", "refusals"))
    assert refused >= nonsense.strange >= 0.9 * MESSAGES
    assert grown < MOST_GROWTH_BYTES
    assert by_store < STORE_BYTES // 10 and max(stores) > STORE_BYTES  # its own process holds it
    assert sorted(after["learners"]) == ["0", "1"]
    tape = list(read_tape(tmp_path / "run" / "tape.jsonl"))
    rows = [event for event in tape if event["event"] == "refused"]
    assert 1 <= len(rows) <= 20  # a line a minute and peer, not ten thousand
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["learners"]) == ("finished", 2)
    assert all(row["tokens_lost"] == 0 for row in summary["per_learner"].values())
