"""Who joined and sends wrong contributions: each kind is refused, told, and on the tape; the run's
result is bitwise that of a run without."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest

from dd_lightning.learner.snapshots import ModelValues
from dd_lightning.protocol.messages import (
    Contribution,
    Goodbye,
    Join,
    Message,
    Rejoin,
    Verdict,
    Welcome,
)
from dd_lightning.protocol.tape import read_tape
from dd_lightning.transport.frames import digest
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import lookup
from tests.diloco_reference import reference
from tests.pacing import Gate, Paced, train
from tests.syncer_jobs import encode
from tests.syncer_process import END_S, Syncer, until
from tests.trainers import Regression, assert_equal, loader, run_threads, values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
STEPS, SYNC_EVERY = 40, 4
ANSWER_S = 30.0
SETTINGS = ("learners=2", "algorithm=diloco", f"algorithm.sync_every={SYNC_EVERY}",
            "algorithm.outer.lr=0.7", "algorithm.outer.momentum=0.9",
            "algorithm.max_learners=3")  # fmt: skip
WRONG = {
    "counters": {"tokens": 9999},
    "layout": {"fingerprint": "another"},
    "fragment": {"fragment": 7},
    "epoch": {"epoch": 7},
    "round": {"round": 5000},
    "base": {"base": (1, 5000)},
    "empty": {"steps": 0},
}
WRONG_PAYLOAD = {
    "byte count": {"num_bytes": 3},
    "checksum": {"digest": "00000000"},
    "codec": {"codec": "zip"},
}
KINDS = [*WRONG, *WRONG_PAYLOAD, "non-finite", "rejoin"]
# values for another fragment are values that do not fit the fragment's layout
REASONS = ["layout" if kind == "fragment" else kind for kind in KINDS]
Wrong = tuple[Message, bytes | memoryview]


def wrong_ones(welcome: Welcome) -> Iterator[Wrong]:
    """(contribution, its bytes), each wrong in one field; in the order of `REASONS`."""
    own = values(Regression(7))
    header, data = encode({name: own[name] for name in welcome.fragments[0]})
    good = Contribution(
        generation=welcome.generation, epoch=welcome.epoch, round=welcome.next_round + 1,
        fragment=0, step=1, steps=1, tokens=10, odometer=10, base=(welcome.epoch, 0),
        payload=header, fingerprint=welcome.fingerprint,
    )  # fmt: skip
    for fields in WRONG.values():
        yield msgspec.structs.replace(good, **fields), data
    for fields in WRONG_PAYLOAD.values():
        payload = msgspec.structs.replace(header, **fields)
        yield msgspec.structs.replace(good, payload=payload), data
    nan = memoryview(b"\xff\xff\xff\xff" * (len(data) // 4))
    described = msgspec.structs.replace(header, digest=digest(nan))
    yield msgspec.structs.replace(good, payload=described), nan
    yield msgspec.structs.replace(good, generation=welcome.generation + 5), data


class Spoiler:
    """A member that never steps."""

    def __init__(self, address: str) -> None:
        self.line = LearnerChannel(lookup(address, END_S), max_message_bytes=1 << 24)

    def hear(self, *kinds: type[Message]) -> Message:
        """The next message of these kinds."""
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            for event in self.line.poll(0.1):
                if isinstance(event.message, kinds):
                    return event.message
        raise TimeoutError(f"none of {kinds} came")

    def spoil(self, gate: Gate) -> list[str]:
        """Sends them all, one for each step of the learners; the reasons it was told."""
        tensors = ModelValues(Regression(7)).infos
        self.line.send(Join(learner="2", incarnation="s", number=1, tensors=tensors))
        welcome, told = self.hear(Welcome), []
        for message, data in wrong_ones(welcome):
            until(lambda: self.line.can_upload())
            assert self.line.send(message, data)
            answer = self.hear(Verdict, Rejoin)
            told.append("rejoin" if isinstance(answer, Rejoin) else answer.reason)
            gate.open()
        self.line.send(Goodbye(generation=welcome.generation, reason="done"))
        return told


def test_each_kind_is_refused_told_and_counted(tmp_path):
    syncer = Syncer(tmp_path / "run", *SETTINGS)
    gate, barrier, told = Gate(len(REASONS)), threading.Barrier(2), []
    ours = [Regression(7), Regression(7)]

    def spoil():
        spoiler = Spoiler(syncer.address)
        try:
            gate.wait_until_training()
            told.extend(spoiler.spoil(gate))
        finally:
            gate.open_all()
            spoiler.line.close()

    try:
        run_threads(
            lambda: train(ours[0], 0, STEPS, syncer.address, Paced(barrier, gate)),
            lambda: train(ours[1], 1, STEPS, syncer.address, Paced(barrier, gate)),
            spoil,
        )
        assert syncer.end(END_S) == 0
    finally:
        syncer.kill()
    assert told == REASONS
    copies = [Regression(7), Regression(7)]
    reference(copies, [loader(0), loader(1)], STEPS, SYNC_EVERY, 1, 0)
    for mine, copy in zip(ours, copies, strict=True):
        assert_equal(values(mine), values(copy))
    tape = list(read_tape(tmp_path / "run" / "tape.jsonl"))
    rows = [event for event in tape if event["event"] == "contribution"]
    refused = Counter(row["verdict"] for row in rows if row["learner"] == "2")
    assert refused == Counter(REASONS[:-1])
    merged = [event["contributors"] for event in tape if event["event"] == "merge"]
    assert merged == [["0", "1"]] * (STEPS // SYNC_EVERY)
