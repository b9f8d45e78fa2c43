"""Learners of the kit that are told to end, and ones that nobody planned for; as threads."""

import os
import signal
import threading
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.launch.data_slot import DataSlot, number_of, wanted_slot
from dd_lightning.launch.leaving import Checkpoints
from dd_lightning.launch.step_log import StepLog, read_steps
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import QUIET, WAIT_S, Regression, loader, run_threads

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
ADDRESS = "tcp://127.0.0.1:1"


def config(learners, **algorithm):
    algorithm = {"preset": "short_run", "fragments": 2, "sync_every": 4, **algorithm}
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners})


class Data(pl.LightningDataModule):
    """Notes the slot that it gave data for."""

    data_slot, used = 0, None

    def train_dataloader(self):
        self.used = self.data_slot
        return loader(self.data_slot)


class At(pl.Callback):
    """Does something once, at the end of a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            self.action()


class EndAfter(pl.Callback):
    """The learner is done after so many steps of its own, wherever it began."""

    def __init__(self, steps):
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.steps:
            trainer.should_stop = True


def checkpoints(folder):
    return Checkpoints(dirpath=str(folder), save_last=True, every_n_train_steps=1000)


def trainer(steps, learner="0", callbacks=(), **strategy):
    options = QUIET | {"enable_checkpointing": any(isinstance(c, Checkpoints) for c in callbacks)}
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=learner, **strategy)
    return pl.Trainer(**options, strategy=strategy, max_steps=steps, callbacks=list(callbacks))


def told_to_end():
    os.kill(os.getpid(), signal.SIGTERM)


def test_who_is_told_to_end_writes_its_state_and_goes_on_from_it(syncer, tmp_path):
    running = syncer(config(1))
    callbacks = [At(5, told_to_end), checkpoints(tmp_path)]
    with pytest.raises(SIGTERMException):
        trainer(500, callbacks=callbacks).fit(Regression(), loader())
    (leave,) = running.events("leave")
    assert "SIGTERM" in leave["cause"]
    last = tmp_path / "last.ckpt"
    assert torch.load(last, weights_only=False)["decoupled_diloco"]["step"] == 5
    syncer(config(1))
    again = trainer(9, callbacks=[checkpoints(tmp_path)])
    again.fit(Regression(), loader(), ckpt_path=str(last), weights_only=False)
    assert again.global_step == 9


def test_an_error_in_a_step_leaves_no_half_done_state(syncer, tmp_path):
    syncer(config(1))

    def fail():
        raise ZeroDivisionError("in the module")

    with pytest.raises(ZeroDivisionError):
        trainer(500, callbacks=[At(5, fail), checkpoints(tmp_path)]).fit(Regression(), loader())
    assert list(tmp_path.glob("*.ckpt")) == []


def test_an_unplanned_learner_joins_takes_a_free_slot_and_goes_on_alone(syncer, tmp_path):
    running = syncer(config(1, max_learners=3))
    started, joined = threading.Event(), threading.Event()
    data = Data()

    class LeaveWhenJoined(pl.Callback):
        """Steps on meanwhile: a newcomer may ask it for its optimizer's state."""

        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 30:
                started.set()
            if joined.is_set():
                raise SIGTERMException
            time.sleep(0.002)

    def planned():
        with pytest.raises(SIGTERMException):
            trainer(1_000_000, "0", [LeaveWhenJoined()]).fit(Regression(), loader())

    def newcomer():
        assert started.wait(WAIT_S)
        slot = DataSlot(tmp_path, in_data=True)
        callbacks = [slot, At(4, joined.set)]
        assert wanted_slot("7", tmp_path, 3) is None  # 7 is no slot of three
        trainer(1_000_000, "7", [*callbacks, EndAfter(60)]).fit(Regression(), datamodule=data)

    run_threads(planned, newcomer)
    join = next(one for one in running.events("join") if one["learner"] == "7")
    assert not join["planned"] and join["data_slot"] == data.used == 1
    assert wanted_slot("7", tmp_path, 3) == 1  # after a restart
    assert next(one["learner"] for one in running.events("leave")) == "0"
    merges = running.events("merge")
    assert any("7" in merge["contributors"] for merge in merges)
    assert merges[-1]["contributors"] == ["7"]


def test_ids_have_numbers_and_wants():
    assert (number_of("3"), number_of("berlin")) == (3, number_of("berlin"))
    assert number_of("berlin") != number_of("oslo")


def test_a_planned_learner_wants_the_slot_of_its_id(tmp_path):
    assert wanted_slot("2", tmp_path, 4) == 2
    assert wanted_slot("berlin", tmp_path, 4) is None


def test_the_step_log_has_every_step_but_the_first_with_its_boundary(syncer, tmp_path):
    syncer(config(1))
    trainer(12, callbacks=[StepLog(tmp_path)]).fit(Regression(), loader())
    (life,) = read_steps(tmp_path)
    assert len(life) == 11
    assert all(0 < step.boundary_s < step.seconds for step in life)
