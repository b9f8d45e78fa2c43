"""An error in the server thread or in training ends the syncer, tells the learners, is written."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest

from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.run import SyncerRun
from dd_lightning.syncer.settings import parse
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import lookup
from tests.syncer_learner import ScriptedLearner

pytestmark = pytest.mark.integration

LOOKUP_S, RUN_S, STEPS = 60.0, 90.0, 1_000_000


@pytest.fixture
def run(tmp_path):
    """A syncer that is not yet executed."""
    settings = ["--run-dir", str(tmp_path / "run"), "algorithm.fragments=2", "learners=1"]
    settings += ["algorithm.sync_every=8", "algorithm.outer.momentum=0.3"]
    with contextlib.ExitStack() as close:
        yield SyncerRun(parse(settings), close)


@pytest.fixture
def learner(run):
    """A learner that runs in a thread until it is released or cut off."""
    channel = LearnerChannel(lookup(run.address, LOOKUP_S), max_message_bytes=1 << 24)
    scripted = ScriptedLearner(channel, "0", STEPS)

    def go() -> None:
        with contextlib.suppress(ConnectionError):
            scripted.run(RUN_S)
        channel.close()

    thread = threading.Thread(target=go)
    thread.start()
    yield scripted
    thread.join(RUN_S)
    assert not thread.is_alive()


def last_event(tmp_path: Path) -> dict:
    return list(read_tape(tmp_path / "run" / "tape.jsonl"))[-1]


def test_a_signal_at_the_announcement_ends_the_run_in_order(tmp_path, run) -> None:
    outcome = run.execute(lambda: os.kill(os.getpid(), signal.SIGINT))
    assert outcome.status == last_event(tmp_path)["status"] == "interrupted"


def test_an_error_in_training_lets_the_learners_go(tmp_path, run, learner, monkeypatch) -> None:
    def broken(self, job, optimizer):
        raise MemoryError("no room for Δ")

    monkeypatch.setattr("dd_lightning.syncer.merger.Merger.merge", broken)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(MemoryError, match="no room"):
        run.execute()
    assert "no room" in learner.told_to_finish
    assert last_event(tmp_path)["status"] == "failed"
    assert signal.getsignal(signal.SIGTERM) is before


def test_an_error_in_the_server_thread_ends_fit_with_it(
    tmp_path, run, learner, monkeypatch
) -> None:
    merged = run.core.merged

    def broken(job, result, now):
        if job.round == 3:
            raise KeyError("a bug in the core")
        merged(job, result, now)

    monkeypatch.setattr(run.core, "merged", broken)
    with pytest.raises(KeyError, match="a bug in the core"):
        run.execute()
    assert last_event(tmp_path)["status"] == "failed"
    run._channel.close()  # the learner sees the connection close
