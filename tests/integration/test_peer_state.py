"""A learner that lost its inner state gets a peer's, and begins at the run's clock."""

import threading

import lightning.pytorch as pl
import pytest
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import QUIET, WAIT_S, Regression, assert_equal, loader, run_threads, values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(**options):
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 8, "max_learners": 4}
    return SyncerConfig.load({"algorithm": algorithm | options.pop("algorithm", {}), **options})


class Adam(Regression):
    """What optimizer state it had before each step, by parameter and key, and the rates."""

    def __init__(self, seed=0, width=5, amsgrad=False):
        super().__init__(seed, width)
        self.amsgrad, self.before, self.rates = amsgrad, [], []

    def on_train_batch_start(self, *_):
        optimizer = self.trainer.optimizers[0]
        names = {p: n for n, p in self.named_parameters()}
        self.before.append(
            {
                f"{names[p]}.{key}": value.clone()
                for p, state in optimizer.state.items()
                for key, value in state.items()
            }
        )
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, amsgrad=self.amsgrad)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class At(pl.Callback):
    """At the end of a step (of this process)."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.action()


def fit(module, learner, steps, *callbacks, data=None):
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=learner, data="none")
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_steps=steps, callbacks=list(callbacks))
    trainer.fit(module, loader(int(learner)) if data is None else data)


def set_and_wait(mine, other):
    def action():
        mine.set()
        assert other.wait(WAIT_S)

    return action


class FirstBatch(pl.Callback):
    def __init__(self, action):
        self.action = action

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 1:
            self.action()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_a_newcomer_gets_the_donors_moments_and_the_runs_rate(syncer, amsgrad):
    running = syncer(config())
    half, joined = threading.Event(), threading.Event()
    donor, late = Adam(0, amsgrad=amsgrad), Adam(1, amsgrad=amsgrad)

    class Go(pl.Callback):
        """The donor steps on only while the newcomer waits for what it donates."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step >= 20 and not joined.is_set():
                half.set()
                joined.wait(0.01)

    def newcomer():
        assert half.wait(WAIT_S)
        fit(late, "1", 60, FirstBatch(joined.set))

    run_threads(lambda: fit(donor, "0", 60, Go()), newcomer)
    (join,) = [join for join in running.events("join") if join["learner"] == "1"]
    assert join["state_from"] == "peer" and join["state_step"] >= 20
    (donation,) = running.events("donation")
    assert donation == {
        "learner": "1", "donor": "0", "transfer": 1, "outcome": "loaded", "chunks": 1
    }  # fmt: skip
    assert_equal(late.before[0], donor.before[join["state_step"]])
    keys = {"step", "exp_avg", "exp_avg_sq"} | ({"max_exp_avg_sq"} if amsgrad else set())
    assert {name.rsplit(".", 1)[1] for name in late.before[0]} == keys
    start = round(0.01 / late.rates[0]) - 1  # the step of the schedule that it began at
    assert start >= 20 and late.rates[0] == donor.rates[start]


def test_donating_changes_not_one_bit_of_the_donors_way(syncer, monkeypatch):
    monkeypatch.setattr("dd_lightning.protocol.transfer.CHUNK_BYTES", 64)  # many pieces
    no_rounds = {"sync_every": 1000}

    class Way(Adam):
        def on_train_batch_end(self, *_):
            self.way = [*getattr(self, "way", []), values(self)]

    alone = Way(0, width=50)
    syncer(config(algorithm=no_rounds))
    fit(alone, "0", 60)
    donor, donated, half = Way(0, width=50), threading.Event(), threading.Event()

    class Go(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if 20 <= trainer.global_step < 50 and not donated.is_set():
                half.set()
                donated.wait(0.05)

    running = syncer(config(algorithm=no_rounds))

    def newcomer():
        assert half.wait(WAIT_S)
        fit(Adam(1, width=50), "1", 60, FirstBatch(donated.set))

    run_threads(lambda: fit(donor, "0", 60, Go()), newcomer)
    assert running.events("donation")[0]["outcome"] == "loaded"
    assert running.events("donation")[0]["chunks"] > 20
    assert len(donor.way) == len(alone.way) == 60
    for ours, theirs in zip(donor.way, alone.way, strict=True):
        assert_equal(ours, theirs)
    for ours, theirs in zip(donor.before, alone.before, strict=True):
        assert_equal(ours, theirs)


class Listed(Adam):
    """An optimizer whose state cannot travel."""

    def on_train_batch_end(self, *_):
        for state in self.trainer.optimizers[0].state.values():
            state["history"] = [1, 2]

    def on_train_batch_start(self, *_):
        pass


def test_a_state_that_cannot_travel_means_cold_with_the_reason(syncer):
    running = syncer(config())
    half, joined = threading.Event(), threading.Event()

    class Go(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step >= 20 and not joined.is_set():
                half.set()
                joined.wait(0.01)

    def newcomer():
        assert half.wait(WAIT_S)
        with pytest.warns(UserWarning, match="empty inner optimizer: 3 donors failed"):
            fit(Listed(), "1", 40, FirstBatch(joined.set))

    run_threads(lambda: fit(Listed(), "0", 40, Go()), newcomer)
    outcomes = [d["outcome"] for d in running.events("donation")]
    assert "a list of an optimizer cannot travel" in outcomes[0]
    assert [j["state_from"] for j in running.events("join") if j["learner"] == "1"] == ["cold"]
