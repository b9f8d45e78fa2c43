"""A learner killed again and again draws each batch once, but for those it had not reported."""

import itertools
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.learner_link import ENDED, LearnerLink
from tests.trainers import QUIET, WAIT_S, Regression, run_threads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*IterableDataset.*"),
    pytest.mark.filterwarnings("ignore:this learner begins with an empty inner optimizer"),
]
ADDRESS = "tcp://127.0.0.1:1"
KILLS, EVERY, DIES_AT = 3, 10, 17  # steps of each life


class Numbered(IterableDataset):
    """Batch i says i; from `start` on, without an end."""

    start = 0

    def __iter__(self):
        for number in itertools.count(self.start):
            generator = torch.Generator().manual_seed(number)
            yield torch.randn(4, 3, generator=generator), torch.full((4, 1), float(number))


class Data(pl.LightningDataModule):
    """Keeps its position, as the text task's does, and can skip."""

    def __init__(self):
        super().__init__()
        self.stream = Numbered()

    def train_dataloader(self):
        return DataLoader(self.stream, batch_size=None)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.stream.start = int(batch[1][0]) + 1
        return batch

    def state_dict(self):
        return {"start": self.stream.start}

    def load_state_dict(self, state):
        self.stream.start = state["start"]

    def skip_to(self, batches):
        self.stream.start = max(self.stream.start, batches)


class Seeing(Regression):
    """Which batches it was trained on."""

    def __init__(self, optimizer=torch.optim.SGD):
        super().__init__(lr=1e-6)
        self.optimizer, self.seen = optimizer, []

    def training_step(self, batch, batch_idx):
        self.seen.append(int(batch[1][0]))
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=1e-6)


class Killed(Exception):
    """The end of a life."""


class Kill(pl.Callback):
    """In the midst of a step of this life; most of what came before has been reported by then."""

    def __init__(self, running, module, at):
        self.running, self.module, self.at = running, module, at

    def on_before_optimizer_step(self, *_):
        drawn = len(self.module.seen)
        if drawn == self.at - 3:
            wait_for(lambda: heard(self.running) >= self.module.seen[-1])
        if drawn == self.at:
            raise Killed


class End(pl.Callback):
    """Of the last life, after some steps of its own: the run's clock may be anywhere."""

    def on_train_batch_end(self, trainer, module, *_):
        trainer.should_stop = len(module.seen) >= DIES_AT


class Beside(pl.Callback):
    """The other learner trains slowly until the first has ended for good."""

    def __init__(self, going, over):
        self.going, self.over = going, over

    def on_train_batch_end(self, trainer, *_):
        self.going.set()
        trainer.should_stop = self.over.wait(0.01)


def heard(running):
    """The position of slot 1, as the syncer knows it."""
    return dict(running.core.run.positions.state()).get(1, 0)


def wait_for(condition):
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, "it was not reported"
        time.sleep(0.001)


def fit(module, learner, *callbacks, folder=None, resumes=False):
    files = [ModelCheckpoint(save_last=True, every_n_train_steps=EVERY)] if folder else []
    trainer = pl.Trainer(
        **QUIET | {"enable_checkpointing": folder is not None},
        strategy=DecoupledDiLoCoStrategy(ADDRESS, learner=learner),
        max_steps=-1,
        callbacks=[*files, *callbacks],
        default_root_dir=folder,
    )
    trainer.fit(module, datamodule=Data(), ckpt_path="last" if resumes else None)


def lives(running, folder):
    """Learner 1, killed three times: what each life saw, and what was heard of it at its end."""
    told = []
    for life in range(KILLS + 1):
        module = Seeing()
        end = Kill(running, module, DIES_AT) if life < KILLS else End()
        try:
            fit(module, "1", end, folder=folder, resumes=bool(folder and life))
        except Killed:
            wait_for(lambda: not running.core.run.members["1"].live)
        told.append((module.seen, heard(running)))
    return told


@pytest.mark.parametrize("state_from", ["checkpoint", "peer", "cold"])
def test_no_batch_comes_again_but_the_unreported(syncer, monkeypatch, tmp_path, state_from):
    # a killed process says no goodbye
    monkeypatch.setattr(LearnerLink, "goodbye", lambda link, reason: link._drop(ENDED))
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 8, "max_learners": 2}
    running = syncer(SyncerConfig.load({"algorithm": algorithm}))
    going, over, told = threading.Event(), threading.Event(), []
    other = Seeing(torch.optim.AdamW if state_from == "cold" else torch.optim.SGD)

    def killed():
        assert going.wait(WAIT_S)
        try:
            told.extend(lives(running, tmp_path if state_from == "checkpoint" else None))
        finally:
            over.set()

    run_threads(lambda: fit(other, "0", Beside(going, over)), killed)
    joins = [join for join in running.events("join") if join["learner"] == "1"]
    assert [join["state_from"] for join in joins[1:]] == [state_from] * KILLS
    assert [join["data_position"] for join in joins] == [seen[0] for seen, _ in told]
    again = 0
    for (seen, position), (later, _) in itertools.pairwise(told):
        assert seen == list(range(seen[0], seen[-1] + 1))
        # exactly where it was last heard of: nothing left out, no reported batch drawn again
        assert later[0] == position > seen[EVERY]
        again += seen[-1] + 1 - position
    every = [number for seen, _ in told for number in seen]
    assert len(every) - len(set(every)) == again <= 4 * KILLS
    assert set(every) == set(range(max(every) + 1))
