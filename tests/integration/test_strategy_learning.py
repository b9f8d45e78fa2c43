"""What a learner does to its module, its counters and its checkpoints."""

import threading

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import (
    QUIET,
    Regression,
    StartTogether,
    assert_equal,
    loader,
    run_threads,
    values,
)

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(learners=1, **options):
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 4, "min_learners": learners}
    algorithm |= options.pop("algorithm", {})
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners, **options})


# learners wait for their merges: how many there are does not depend on the machine's speed
WAITING = {"wait": "overlap", "overlap": 0}


def trainer(steps, learner="0", callbacks=(), strategy=None, **options):
    strategy = strategy or DecoupledDiLoCoStrategy(ADDRESS, learner=learner)
    return pl.Trainer(
        **{**QUIET, **options}, strategy=strategy, max_steps=steps, callbacks=list(callbacks)
    )


class Values(pl.Callback):
    """What the module held when its first batch began."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 0 and trainer.global_step == 0:
            self.first = values(module)


def tokens_of(running, learner="0"):
    (ledger,) = [e for e in running.events("ledger") if e["learner"] == learner]
    for row in ledger["fragments"]:
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
    return ledger["fragments"][0]["processed"]


def test_learners_of_different_seeds_begin_from_the_same_parameters(syncer):
    running = syncer(config(2, algorithm=WAITING))
    barrier, seen = threading.Barrier(2), [Values(), Values()]

    def learner(i):
        fit = trainer(8, str(i), [StartTogether(barrier), seen[i]]).fit
        return lambda: fit(Regression(i), loader(i))

    run_threads(learner(0), learner(1))
    assert_equal(seen[0].first, seen[1].first)
    (layout,) = running.events("layout")
    names = [name for fragment in layout["fragments"] for name in fragment]
    assert sorted(names) == sorted(name for name, _ in Regression().named_parameters())
    assert {merge["fragment"] for merge in running.events("merge")} == {0, 1}
    assert tokens_of(running, "0") == tokens_of(running, "1") == 32


class Tied(pl.LightningModule):
    """Tied embedding and head, a frozen layer, running statistics, a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.full((2,), float("-inf")))
        self.register_buffer("idle", torch.ones(2))
        self.first_row = self.embed.weight[0].detach()  # shares its storage

    def training_step(self, batch, batch_idx):
        x, _ = batch
        ids = x[:, 0].abs().long() % 7
        return nn.functional.cross_entropy(self.head(self.norm(self.embed(ids))), ids)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def test_the_structure_of_a_module_survives_its_applies(syncer):
    running = syncer(config(algorithm={**WAITING, "average_tensors": "x^"}))
    module = Tied()
    frozen, places = values(module.frozen), [p.data_ptr() for p in module.parameters()]
    trainer(9).fit(module, loader())
    assert len(running.events("merge")) > 3
    assert module.head.weight is module.embed.weight
    assert [p.data_ptr() for p in module.parameters()] == places
    assert torch.equal(module.first_row, module.embed.weight[0])
    assert_equal(values(module.frozen), frozen)
    (layout,) = running.events("layout")
    names = sorted(name for fragment in layout["fragments"] for name in fragment)
    assert names == [
        "embed.weight", "idle", "norm.bias", "norm.running_mean", "norm.running_var", "norm.weight"
    ]  # fmt: skip
    assert layout["averaged"] == ["embed.weight"]
    theta = running.theta.by_name
    assert not torch.equal(theta["norm.running_var"], torch.ones(3))  # it travels once it changes
    assert torch.equal(theta["idle"], torch.ones(2))


class TwoOptimizers(Regression):
    """Manual optimization; the second optimizer steps every other batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        first.step()
        if batch_idx % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self):
        return [
            torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.net[0], self.net[2])
        ]


def test_manual_optimization_counts_batches_not_optimizers(syncer):
    running = syncer(config(algorithm=WAITING))
    trainer(-1, limit_train_batches=12, max_epochs=1).fit(TwoOptimizers(), loader())
    assert tokens_of(running) == 12 * 4
    assert [s["step"] for s in running.events("state") if s["state"] == "finishing"] == [12]
    assert len(running.events("merge")) >= 4


def test_a_checkpoint_under_manual_optimization_counts_the_step_before_it(syncer, tmp_path):
    syncer(config())

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            if batch_idx == 4:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    options = {"limit_train_batches": 8, "max_epochs": 1}
    trainer(-1, callbacks=[Save()], **options).fit(TwoOptimizers(), loader())
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["decoupled_diloco"]
    assert (state["step"], state["data_position"]) == (5, 5)


def test_shards_need_a_sampler_of_lightning(syncer):
    syncer(config(2, algorithm={"min_learners": 1}))
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner="0", inner="single_device", data="shard")
    with pytest.warns(UserWarning, match="has no effect"):
        trainer(3, strategy=strategy).fit(Regression(), loader())


def test_tokens_of_all_micro_batches_count_with_their_step(syncer):
    running = syncer(config())
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner="0", tokens=lambda batch: 100)
    options = {"accumulate_grad_batches": 3, "limit_train_batches": 15}
    trainer(6, strategy=strategy, **options).fit(Regression(), loader())
    assert tokens_of(running) == 6 * 300
    assert {c["tokens"] % 300 for c in running.events("contribution")} == {0}


class Skipping(Regression):
    """Every third `training_step` returns no loss."""

    def training_step(self, batch, batch_idx):
        if batch_idx % 3 == 2:
            return None
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss_is_not_counted_but_its_tokens_are(syncer):
    running = syncer(config())
    trainer(-1, limit_train_batches=10, max_epochs=1).fit(Skipping(), loader())
    assert [s["step"] for s in running.events("state") if s["state"] == "finishing"] == [7]
    assert tokens_of(running) == 40


class Overflowing(Regression):
    """Its gradients overflow in every third step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx % 3 == 0 else loss


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*")
def test_a_step_that_the_gradient_scaler_skips_is_not_counted(syncer):
    running = syncer(config())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler)
    trainer(-1, limit_train_batches=9, max_epochs=1, plugins=[precision]).fit(
        Overflowing(), loader()
    )
    assert [s["step"] for s in running.events("state") if s["state"] == "finishing"] == [6]
    assert tokens_of(running) == 36


def test_sixteen_bit_learners_train_and_send_what_they_moved(syncer):
    running = syncer(config(algorithm={**WAITING, "codec": "bf16"}))
    trainer(12, precision="bf16-true").fit(Regression(), loader())
    (join,) = running.events("join")
    assert join["dtype"] == "bfloat16"
    verdicts = {c["verdict"] for c in running.events("contribution")}
    assert "accepted" in verdicts and verdicts <= {"accepted", "late"}  # late: at the very end
    assert tokens_of(running) == 48


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_checkpoint_holds_the_state_and_another_process_goes_on_from_it(syncer, tmp_path):
    running = syncer(config())
    first = trainer(6)
    module = Regression()

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "a.ckpt")

    first.callbacks.append(Save())
    first.fit(module, loader())
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["decoupled_diloco"]
    assert (state["step"], state["data_position"], state["odometer"]) == (5, 5, 20)
    assert [e["step"] for e in running.events("learner_checkpoint")] == [5]

    running = syncer(config())
    trainer(9).fit(Regression(), loader(), ckpt_path=tmp_path / "a.ckpt")
    (join,) = running.events("join")
    assert (join["state_from"], join["state_step"], join["data_position"]) == ("checkpoint", 5, 5)
    assert [s["step"] for s in running.events("state") if s["state"] == "finishing"] == [9]
    assert tokens_of(running) == 16  # of this incarnation


def test_validation_is_a_pause(syncer):
    running = syncer(config())
    trainer(8, val_check_interval=4, limit_val_batches=1).fit(Regression(), loader(), loader())
    states = [s["state"] for s in running.events("state")]
    assert states == ["training", "paused", "training", "paused", "finishing"]


def test_validate_and_predict_need_no_syncer(syncer):
    running = syncer(config())
    running.reachable = False
    (result,) = trainer(1).validate(Regression(), loader(), verbose=False)
    assert result["val_loss"] > 0


def test_shards_are_disjoint_and_orders_differ(syncer):
    seen = {}

    class Record(Regression):
        def __init__(self, key):
            super().__init__()
            self.key = key

        def training_step(self, batch, batch_idx):
            seen.setdefault(self.key, []).extend(batch[0][:, 0].tolist())
            return super().training_step(batch, batch_idx)

    def run(mode):
        syncer(config(2))
        barrier = threading.Barrier(2)

        def learner(i):
            strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=str(i), data=mode)
            options = {"strategy": strategy, "max_epochs": 1}
            fit = trainer(-1, str(i), [StartTogether(barrier)], **options).fit
            return lambda: fit(Record((mode, i)), loader(shuffle=True))

        run_threads(learner(0), learner(1))

    everything = sorted(x for batch in loader() for x in batch[0][:, 0].tolist())
    run("shard")
    assert sorted(seen["shard", 0] + seen["shard", 1]) == everything
    run("seed")
    assert sorted(seen["seed", 0]) == sorted(seen["seed", 1]) == everything
    assert seen["seed", 0] != seen["seed", 1]
