"""Inner state from a peer over real sockets: donor or receiver dies, or a link is cut, midway."""

import threading

import lightning.pytorch as pl
import pytest
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.inner_link import InnerLink
from dd_lightning.protocol.transfer import Assembly
from tests.socket_run import run_over_sockets
from tests.trainers import QUIET, WAIT_S, Regression, loader

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    # of a killed donor that comes back when the others have finished
    pytest.mark.filterwarnings("ignore:this learner begins with an empty inner optimizer"),
]
RECEIVER = "2"


class Killed(BaseException):
    """As SIGKILL: nothing is said any more."""


class Adam(Regression):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Stage:
    """Three learners; what happens to whom, and when."""

    def __init__(self):
        self.strategies, self.dying = {}, set()
        self.seen_20, self.loaded = threading.Event(), threading.Event()
        self.donors = []  # links that began to donate, in order

    def train(self, learner):
        def run(address):
            strategy = self.strategies[learner] = DecoupledDiLoCoStrategy(address, learner=learner)
            script = Script(self, learner)
            trainer = pl.Trainer(**QUIET, strategy=strategy, max_steps=10**6, callbacks=[script])
            trainer.fit(Adam(width=200), loader(int(learner)))

        return run

    def kill(self, learner):
        """In its training thread."""
        self.dying.discard(learner)
        strategy = self.strategies[learner]
        link = strategy._session._link
        link.goodbye = lambda reason: link._drop("ended")
        raise Killed

    def cut(self, learner):
        """Close its connection; it comes back by itself."""
        comm = self.strategies[learner]._session._comm
        comm.call(lambda: comm._lose("cut by the test"))

    def donor(self):
        links = {
            id(s._session._link.inner): name for name, s in self.strategies.items() if s._session
        }
        return links[id(self.donors[0])]


class Script(pl.Callback):
    def __init__(self, stage, learner):
        self.stage, self.learner = stage, learner

    def on_train_batch_end(self, trainer, *_):
        stage = self.stage
        if self.learner in stage.dying:
            stage.kill(self.learner)
        if self.learner == RECEIVER and not stage.seen_20.is_set():
            if trainer.global_step == 20:
                stage.seen_20.set()
                stage.kill(RECEIVER)
        elif self.learner == RECEIVER:  # back at work: with all that it needed
            stage.loaded.set()
        if stage.loaded.is_set():
            trainer.should_stop = True


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr("dd_lightning.protocol.transfer.CHUNK_BYTES", 64)  # 150 pieces
    made, donate = Stage(), InnerLink.donate

    def recorded(self, source):
        made.donors.append(self)
        donate(self, source)

    monkeypatch.setattr(InnerLink, "donate", recorded)
    return made


CASES = [("donor", "nothing"), *((a, b) for a in ("donor", "receiver") for b in ("kill", "cut"))]


@pytest.mark.parametrize(("whom", "what"), CASES)
def test_a_transfer_is_disturbed_in_the_middle(stage, tmp_path, monkeypatch, whom, what):
    add, disturbed = Assembly.add, threading.Event()

    def interrupted(self, message, data):
        add(self, message, data)
        if self.chunks == 3 and not disturbed.is_set() and what != "nothing":
            disturbed.set()
            name = stage.donor() if whom == "donor" else RECEIVER
            if what == "cut":
                stage.cut(name)
            elif whom == "donor":
                stage.dying.add(name)
            else:
                stage.kill(name)

    monkeypatch.setattr(Assembly, "add", interrupted)

    def lives(learner, most):
        """Start it again whenever it was killed."""

        def run(address):
            for _ in range(most):
                try:
                    return stage.train(learner)(address)
                except Killed:
                    continue

        return run

    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 8, "max_learners": 3}
    timeouts = {"rejoin": WAIT_S}
    config = SyncerConfig.load({"algorithm": algorithm, "learners": 3, "timeouts": timeouts})
    tape = run_over_sockets(tmp_path, config, lives("0", 2), lives("1", 2), lives(RECEIVER, 3))
    joins = [e for e in tape if e["event"] == "join" and e["learner"] == RECEIVER]
    donations = [e for e in tape if e["event"] == "donation"]
    outcomes = [d["outcome"] for d in donations if d["learner"] == RECEIVER]
    assert joins[-1]["state_from"] == "peer" and outcomes[-1] == "loaded"
    assert [j["generation"] for j in joins] == list(range(1, len(joins) + 1))
    if what == "nothing":
        assert outcomes == ["loaded"] and [j["state_from"] for j in joins] == ["cold", "peer"]
    elif whom == "receiver":
        assert outcomes == ["the receiver is gone", "loaded"]
        assert [j["state_from"] for j in joins] == ["cold", "cold", "peer"]
    else:
        assert outcomes == ["the donor is gone", "loaded"]
        assert donations[0]["donor"] != donations[1]["donor"]
    for ledger in (e for e in tape if e["event"] == "ledger"):
        for row in ledger["fragments"]:
            assert row["processed"] == row["merged"] + row["lost"] and row["pending"] == 0
