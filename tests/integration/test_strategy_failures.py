"""How a learner fails, loses its syncer, is told to stop, and leaves."""

import os
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.chaos.callback import poison
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import QUIET, WAIT_S, Regression, loader, run_threads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(learners=1, **options):
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 4}
    algorithm |= options.pop("algorithm", {})
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners, **options})


def trainer(steps, learner="0", callbacks=(), **strategy):
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=learner, **strategy)
    return pl.Trainer(**QUIET, strategy=strategy, max_steps=steps, callbacks=list(callbacks))


class At(pl.Callback):
    """Do something once, at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.action()


def assert_no_comm_threads():
    assert not [t.name for t in threading.enumerate() if t.name.startswith("dd-lightning")]


def assert_ledger_adds_up(running):
    for ledger in running.events("ledger"):
        for row in ledger["fragments"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]


def test_an_unreachable_syncer_ends_in_an_error_that_says_what_was_tried(syncer):
    syncer(config()).reachable = False
    with pytest.raises(ConnectionError, match=r"tcp://127.0.0.1:1.*\d+ attempts.*nobody listens"):
        trainer(4, connect_timeout=0.5).fit(Regression(), loader())
    assert_no_comm_threads()


def test_another_model_is_refused_with_the_first_difference(syncer):
    syncer(config(2))
    started, refused = threading.Event(), threading.Event()

    class HoldOn(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            started.set()
            assert refused.wait(WAIT_S)

    def second():
        assert started.wait(WAIT_S)
        try:
            with pytest.raises(ConnectionError, match=r"refused.*net\.0\.bias"):
                trainer(4, "1").fit(Regression(width=6), loader())
        finally:
            refused.set()

    run_threads(lambda: trainer(4, "0", [HoldOn()]).fit(Regression(), loader()), second)


def test_a_learner_past_its_proxy_is_an_error(syncer, monkeypatch):
    monkeypatch.setenv("DD_VIA", "127.0.1.7")
    syncer(config())
    with pytest.raises(ConnectionError, match="past its proxy"):
        trainer(4).fit(Regression(), loader())
    syncer(config(), peer_address="127.0.1.7")
    trainer(4).fit(Regression(), loader())


def test_a_failure_of_the_comm_thread_reaches_fit(syncer, monkeypatch):
    syncer(config())
    broken = threading.Event()

    def encode(self, upload):
        broken.set()
        raise ZeroDivisionError("codec broke")

    class WaitBroken(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            if trainer.global_step == 8:
                assert broken.wait(WAIT_S)

    def use_broken_codec():
        monkeypatch.setattr("dd_lightning.learner.payload.Coder.encode", encode)

    with pytest.raises(RuntimeError, match=r"comm thread.*codec broke"):
        trainer(30, callbacks=[At(1, use_broken_codec), WaitBroken()]).fit(Regression(), loader())
    assert_no_comm_threads()


def test_an_exception_in_training_says_goodbye(syncer):
    running = syncer(config())

    def fail():
        raise ZeroDivisionError("in the module")

    with pytest.raises(ZeroDivisionError):
        trainer(9, callbacks=[At(5, fail)]).fit(Regression(), loader())
    (leave,) = running.events("leave")
    assert "in the module" in leave["cause"]
    assert_no_comm_threads()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(syncer, sent):
    running = syncer(config())
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer(500, callbacks=[At(5, lambda: os.kill(os.getpid(), sent))]).fit(
            Regression(), loader()
        )
    assert len(running.events("leave")) == 1
    assert_no_comm_threads()


@pytest.mark.parametrize("apply", ["overwrite", "rebase", "mix"])
def test_a_cut_connection_costs_nothing_but_time(syncer, apply):
    algorithm = {"apply": apply, "mix_alpha": 0.5 if apply == "mix" else 0, "max_learners": 2}
    # without `rejoin` a run whose only learner is lost is over at once
    running = syncer(config(algorithm=algorithm, timeouts={"rejoin": WAIT_S}))
    cuts = [At(step, running.cut) for step in (1, 6, 13)]

    class WaitAttached(pl.Callback):
        """Steps here take a millisecond, a reconnect 50: do not end before it."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step in (5, 12, 19):
                deadline = time.monotonic() + WAIT_S
                while len(running.events("join")) < 2 + (trainer.global_step - 5) // 7:
                    assert time.monotonic() < deadline, "it does not come back"
                    time.sleep(0.005)

    trainer(24, callbacks=[*cuts, WaitAttached()]).fit(Regression(), loader())
    joins = running.events("join")
    assert [j["generation"] for j in joins] == [1, 2, 3, 4]
    assert [j["continues"] for j in joins] == [False, True, True, True]
    assert len({j["incarnation"] for j in joins}) == 1
    (ledger,) = running.events("ledger")
    assert ledger["fragments"][0]["processed"] == 96
    assert_ledger_adds_up(running)
    if apply == "rebase":
        assert [row["merged"] for row in ledger["fragments"]] == [96, 96]


def test_a_met_budget_stops_the_learners(syncer):
    running = syncer(config(budget_tokens=40))
    trainer(100_000).fit(Regression(), loader())
    assert running.core.run.tokens_merged >= 40
    assert_ledger_adds_up(running)


@pytest.mark.parametrize("planned", [2, None])
def test_a_newcomer_starts_at_the_clock_of_the_run_unless_it_was_planned(syncer, planned):
    running = syncer(config(planned))
    half, joined = threading.Event(), threading.Event()

    class HoldOn(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 20:
                half.set()
                assert joined.wait(WAIT_S)

    class Joined(pl.Callback):
        def on_train_start(self, trainer, module):
            joined.set()

    def late():
        assert half.wait(WAIT_S)
        trainer(40, "1", [Joined()]).fit(Regression(), loader())

    run_threads(lambda: trainer(40, "0", [HoldOn()]).fit(Regression(), loader()), late)
    steps = {s["learner"]: s["step"] for s in running.events("state") if s["state"] == "finishing"}
    assert steps["0"] == 40
    assert steps["1"] == 40 if planned else 20 <= steps["1"] <= 22


class Exploding(pl.LightningModule):
    """Turns NaN after step 3, and recovers when its parameters are reloaded."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.batches = 0

    def training_step(self, batch, batch_idx):
        self.batches += 1
        factor = float("nan") if 3 < self.batches < 30 else 1.0
        return self.layer(batch[0]).square().mean() * factor

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())


def test_non_finite_parameters_are_reloaded_and_the_inner_optimizer_reset(syncer):
    running = syncer(config())
    module = Exploding()
    trainer(1_000_000, callbacks=[Until(running)]).fit(module, loader())
    verdicts = [c["verdict"] for c in running.events("contribution")]
    assert verdicts.count("non-finite") >= 3 and verdicts[-1] == "accepted"
    assert all(torch.isfinite(p).all() for p in module.parameters())


class Until(pl.Callback):
    """Stop once a contribution is accepted after refusals."""

    def __init__(self, running):
        self.running = running

    def on_train_batch_end(self, trainer, module, *_):
        verdicts = [c["verdict"] for c in self.running.events("contribution")]
        if "non-finite" in verdicts and verdicts[-1] == "accepted" and module.batches > 30:
            trainer.should_stop = True


class Poisoned(pl.Callback):
    """Poisons the parameters after a step, once; stops when a contribution is accepted again."""

    def __init__(self, running):
        self.running, self.done = running, False

    def on_train_batch_end(self, trainer, module, *_):
        verdicts = [c["verdict"] for c in self.running.events("contribution")]
        if not self.done and verdicts.count("accepted") >= 3:
            poison(module, "nan")
            self.done = True
        if "non-finite" in verdicts and verdicts[-1] == "accepted":
            trainer.should_stop = True


class Adamant(Regression):
    """Its optimizer remembers what it saw."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_parameters_that_turned_nan_in_every_fragment_are_reloaded_at_once(syncer):
    """Fragment by fragment, each would be ruined through the others before they have come."""
    running = syncer(config(algorithm={"fragments": 3}))
    module = Adamant()
    fitted = trainer(1_000_000, callbacks=[Poisoned(running)])
    fitted.fit(module, loader())
    verdicts = [c["verdict"] for c in running.events("contribution")]
    assert 3 <= verdicts.count("non-finite") <= 9  # two reloads more, on a busy machine
    assert all(torch.isfinite(p).all() for p in module.parameters())
    for state in fitted.optimizers[0].state.values():
        assert torch.isfinite(state["exp_avg"]).all()
