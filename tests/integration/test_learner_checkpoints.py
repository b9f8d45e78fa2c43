"""A learner's own checkpoint: what comes back from it, and the traps around Lightning's files."""

import random
import threading

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import QUIET, WAIT_S, Regression, assert_equal, loader, run_threads, values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config():
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 1000}
    return SyncerConfig.load({"algorithm": algorithm, "learners": 1})


def trainer(steps, folder=None, learner="0", callbacks=(), **strategy):
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=learner, **strategy)
    options = QUIET | {"enable_checkpointing": folder is not None}
    files = [ModelCheckpoint(save_last=True, every_n_train_steps=10)] if folder is not None else []
    return pl.Trainer(
        **options, strategy=strategy, max_steps=steps, callbacks=[*files, *callbacks],
        default_root_dir=folder,
    )  # fmt: skip


class Dropping(Regression):
    """With dropout, Adam and a schedule: all that a checkpoint must bring back."""

    def __init__(self):
        super().__init__(1)
        self.dropout, self.rates = nn.Dropout(0.5), []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        x, y = batch
        noise = torch.tensor([random.random() + np.random.rand()])
        return nn.functional.mse_loss(self.net(self.dropout(x)), y) * noise

    def on_train_batch_end(self, *_):
        self.last = values(self)  # the hand-in after the last step merges, and moves them

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Die(pl.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            raise ZeroDivisionError


def seed(value):
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


class Endless(IterableDataset):
    """The same batches again and again, from batch `start` on."""

    start = 0

    def __iter__(self):
        batches = list(loader())
        while True:
            yield batches[self.start % len(batches)]
            self.start += 1


class Positioned(pl.LightningDataModule):
    """Keeps its position in the checkpoint, as the text task's does."""

    def __init__(self):
        super().__init__()
        self.stream, self.used = Endless(), 0

    def train_dataloader(self):
        self.stream.start = self.used
        return DataLoader(self.stream, batch_size=None)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.used += 1
        return batch

    def state_dict(self):
        return {"used": self.used}

    def load_state_dict(self, state):
        self.used = state["used"]


@pytest.mark.filterwarnings("ignore:.*IterableDataset.*")
def test_last_goes_on_as_if_nothing_had_happened(syncer, tmp_path):
    syncer(config())
    undisturbed, first, second = Dropping(), Dropping(), Dropping()
    seed(3)
    trainer(48).fit(undisturbed, datamodule=Positioned())
    seed(3)
    syncer(config())
    with pytest.raises(ZeroDivisionError):
        trainer(48, tmp_path, callbacks=[Die(35)]).fit(first, datamodule=Positioned())
    seed(99)
    running = syncer(config())
    trainer(48, tmp_path).fit(second, datamodule=Positioned(), ckpt_path="last")
    assert_equal(second.last, undisturbed.last)
    assert first.rates[:30] + second.rates == undisturbed.rates
    (join,) = running.events("join")
    assert (join["state_from"], join["state_step"], join["data_position"]) == ("checkpoint", 30, 30)


def test_the_state_is_small_and_weights_only(syncer, tmp_path):
    syncer(config())
    wide = Regression(width=100_000, lr=1e-9)
    trainer(10, tmp_path).fit(wide, loader())
    file = tmp_path / "checkpoints" / "last.ckpt"
    state = torch.load(file, weights_only=True)["decoupled_diloco"]
    sizes = {key: value.numel() for key, value in state["rng"].items() if torch.is_tensor(value)}
    assert sizes == {"torch": torch.get_rng_state().numel()}
    torch.save(state, tmp_path / "state.pt")
    assert (tmp_path / "state.pt").stat().st_size < 64_000  # and no second copy of the model


def test_evaluation_of_a_file_is_of_that_file_and_opens_no_connection(syncer, tmp_path):
    running = syncer(config())
    trained = Regression(2)
    trainer(10, tmp_path).fit(trained, loader())
    running.reachable = False
    file = tmp_path / "checkpoints" / "last.ckpt"
    plain = pl.Trainer(**QUIET)
    (expected,) = plain.validate(trained, loader(), verbose=False)
    (found,) = trainer(1, tmp_path).validate(Regression(5), loader(), ckpt_path=file, verbose=False)
    assert found == expected


class Configured(Regression):
    def __init__(self, options):
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_that_are_no_plain_values_load_when_told_so(syncer, tmp_path):
    options = OmegaConf.create({"a": {"b": 1}})
    syncer(config())
    trainer(10, tmp_path).fit(Configured(options), loader())
    syncer(config())
    with pytest.raises(Exception, match="weights_only"):
        trainer(20, tmp_path).fit(Configured(options), loader(), ckpt_path="last")
    running = syncer(config())
    trainer(20, tmp_path, ckpt_weights_only=False).fit(
        Configured(options), loader(), ckpt_path="last"
    )
    assert running.events("join")[0]["state_from"] == "checkpoint"


def test_a_checkpoint_of_another_run_is_refused_with_the_way_out(syncer, tmp_path):
    syncer(config())
    trainer(10, tmp_path).fit(Regression(), loader())
    running = syncer(config())
    running.core.run.run_id = "another"
    with pytest.raises(ConnectionError, match=r"run run, this is run another.*without ckpt_path"):
        trainer(20, tmp_path).fit(Regression(), loader(), ckpt_path="last")


def test_a_second_learner_in_the_same_folder_is_refused(syncer, tmp_path):
    syncer(config())
    trainer(2, tmp_path).fit(Regression(), loader())
    with pytest.raises(ValueError, match=r"learner '1'.*learner '0'.*default_root_dir"):
        trainer(2, tmp_path, learner="1").fit(Regression(), loader())


@pytest.mark.filterwarnings("ignore:.*IterableDataset.*")
def test_an_endless_stream_without_a_position_is_warned_of(syncer, tmp_path):
    stream = DataLoader(Endless(), batch_size=None)
    syncer(config())
    trainer(10, tmp_path).fit(Regression(), stream)
    syncer(config())
    with pytest.warns(UserWarning, match=r"10 batches.*begins again at its first batch"):
        trainer(12, tmp_path).fit(Regression(), stream, ckpt_path="last")


def test_a_newer_syncer_gives_the_parameters_and_the_file_the_rest(syncer, tmp_path):
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 1000}
    running = syncer(SyncerConfig.load({"algorithm": algorithm, "learners": 2}))
    back = threading.Event()
    seen = {}

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 20:
                assert back.wait(WAIT_S)

    class Back(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.setdefault("parameters", values(module))
            seen.setdefault("optimizer", bool(trainer.optimizers[0].state))
            back.set()

    def killed():
        with pytest.raises(ZeroDivisionError):
            trainer(30, tmp_path, callbacks=[Die(15)]).fit(Dropping(), loader())
        again = trainer(30, tmp_path, callbacks=[Back()])
        again.fit(Dropping(), loader(), ckpt_path="last")

    run_threads(
        lambda: trainer(30, learner="1", callbacks=[Keep()]).fit(Dropping(), loader()), killed
    )
    joins = [join for join in running.events("join") if join["learner"] == "0"]
    assert [(j["generation"], j["state_from"], j["state_step"]) for j in joins] == [
        (1, "cold", 0),
        (2, "checkpoint", 10),
    ]
    assert_equal(seen["parameters"], values(Dropping()))  # Θ is still version 0
    assert seen["optimizer"]
