"""Rows of the table that are not one fit beside a plain one: each runs, and asserts, by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf

from dd_lightning import DecoupledDiLoCoMonitor
from tests.conformance.feature import samples
from tests.conformance.live_syncer import LiveSyncer
from tests.conformance.observing import checkpoint, exponential
from tests.conformance.place import Place, config, fit_in_rank, is_finite, values
from tests.conformance.ranks import Ranks
from tests.trainers import QUIET, Regression, assert_equal, run_threads


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run(place)` asserts, in one process or on each rank of a group; the other fields are
    `Feature`'s.

    Attributes:
        run_group: of a scenario with several learners, (inner, ranks, folder) in place of it.
    """

    name: str
    title: str
    run: Callable[[Place], None]
    run_group: Callable[[str, Ranks, Path], None] | None = None
    ignore: tuple[str, ...] = ()


def several_fits(place):
    """Each fit is a stay in a run of its own; what the Trainer counts goes on."""
    ours, plain = place.module(Regression), place.module(Regression)
    one, other = place.trainer(), place.plain()
    for fit in (1, 2, 3):
        running = place.syncer(config())
        one.fit_loop.max_epochs = other.fit_loop.max_epochs = fit
        one.fit(ours, place.samples(fit, 5))
        other.fit(plain, place.samples(fit, 5))
        place.assert_counted(running, 5, 20)
        assert_equal(values(ours), values(plain))
        place.assert_theta(running, values(plain))
    assert one.global_step == other.global_step == 15


def evaluation_without_a_syncer(place):
    """validate, test and predict open no connection, before a fit and after one."""
    running = place.syncer(config())
    module, one = place.module(Predicting), place.trainer()

    def check():
        running.reachable = False
        plain = place.plain()
        for name in ("validate", "test"):
            ours = getattr(one, name)(module, place.validation(), verbose=False)
            assert ours == getattr(plain, name)(module, place.validation(), verbose=False)
        mine = one.predict(module, place.validation())
        theirs = plain.predict(module, place.validation())
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
        running.reachable = True

    check()
    one.fit(module, place.samples(0, 4))
    place.assert_counted(running, 4, 16)
    check()


class Predicting(Regression):
    """With what `test` and `predict` call."""

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.training_step(batch, batch_idx))

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


class Poisoned(Regression):
    """Its loss is NaN in one batch, and its momentum from then on."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 6 else loss


POISONED = {"preset": "short_run", "fragments": 2, "sync_every": 4, "min_learners": 2}


def nan_stays_with_its_learner(place):
    """Its contributions are refused, the other learner trains on, Θ is made of finite values."""
    modules = [place.module(Regression), place.module(Poisoned)]
    running = place.syncer(config(2, **POISONED))

    def learner(index):
        trainer = place.trainer(str(index))
        return lambda: trainer.fit(modules[index], place.samples(index, 120))

    run_threads(learner(0), learner(1))
    assert_stayed(running, "0", "1")
    assert is_finite(modules[0])
    place.assert_counted(running, 120, 480)


def nan_in_a_run_with_a_group(inner, ranks, folder):
    """The group is the poisoned one, and then the healthy one."""
    for_group(inner, ranks, folder / "0", Poisoned, Regression)
    for_group(inner, ranks, folder / "1", Regression, Poisoned)


def for_group(inner, ranks, folder, kind, other):
    """Learner 0 is the group, with a module of `kind`."""
    with LiveSyncer(folder, config(2, **POISONED)) as running:
        single = Place("auto", None, folder, address=lambda: running.address)

        def group():
            finite = ranks.run(fit_in_rank, kind, inner, str(folder), running.address, 120)
            assert kind is Poisoned or finite == [True, True]

        run_threads(group, lambda: single.trainer("1").fit(other(), single.samples(1, 120)))
    assert_stayed(running, *(("1", "0") if kind is Poisoned else ("0", "1")))


def assert_stayed(running, healthy, poisoned):
    """Refused are the contributions of one, merged those of the other; Θ is finite."""
    verdicts = {
        learner: [c["verdict"] for c in running.events("contribution") if c["learner"] == learner]
        for learner in (healthy, poisoned)
    }
    assert "non-finite" in verdicts[poisoned] and "non-finite" not in verdicts[healthy]
    assert verdicts[healthy].count("accepted") >= 2
    assert all(torch.isfinite(tensor).all() for tensor in running.parameters().values())


def checkpoint_resumes(place):
    """The file holds the learner's counters; another process goes on from it, as plain Lightning
    does, and its steps count on from there."""
    place.syncer(config())
    saver = ModelCheckpoint(place.folder, filename="end")
    first = place.trainer(callbacks=[saver], enable_checkpointing=True)
    settings = OmegaConf.create({"lr": 0.05, "size": {"width": 5}})
    first.fit(place.module(Configured, settings), place.samples(0, 8))
    path = place.folder / "end.ckpt"
    meta = path / "meta.pt" if path.is_dir() else path
    state = torch.load(meta, weights_only=False)["decoupled_diloco"]
    counts = state["step"], state["odometer"], state["data_position"]
    assert counts == (8, 32 * place.ranks, 8)

    running = place.syncer(config())
    ours, plain = place.module(Configured, settings), place.module(Regression)
    saver = ModelCheckpoint(place.folder, filename="after")  # Lightning wants all that has a state
    options = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 2}
    second = place.trainer(ckpt_weights_only=False, **options)
    second.fit(ours, place.samples(0, 8), ckpt_path=path)
    place.plain(max_epochs=2).fit(plain, place.samples(0, 8))
    assert_equal(values(ours), values(plain))
    place.assert_counted(running, 16, 32)
    assert second.global_step == (0 if place.spawns else 16)  # which Lightning takes not back
    if place.leads:
        (join,) = running.events("join")
        took = join["state_from"], join["state_step"], join["data_position"]
        assert took == ("checkpoint", 8, 8)


class Configured(Regression):
    """Its hyperparameters are Hydra's: a DictConfig, which a checkpoint then holds."""

    def __init__(self, settings):
        super().__init__(width=settings.size.width, lr=settings.lr)
        self.save_hyperparameters()


def average_is_not_handed_in(place):
    """WeightAveraging leaves its average in the module; Θ gets the weights of the last step."""
    running = place.syncer(config())
    ours, plain = place.module(Regression), place.module(Regression)
    averaging = WeightAveraging(avg_fn=exponential)
    place.trainer(callbacks=[averaging]).fit(ours, place.samples(0, 8))
    place.plain().fit(plain, place.samples(0, 8))
    place.assert_counted(running, 8, 32)
    place.assert_theta(running, values(plain))
    averaged, last = values(ours), values(plain)
    assert not torch.equal(averaged["net.0.weight"], last["net.0.weight"])


class Losses(Callback):
    """At each validation: the weights it was made with, and both losses."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, module):
        losses = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((values(module), losses))


def global_validation(place):
    """Θ and the learner's own weights, each under its name; the module keeps its own, and neither
    the checkpoint nor the syncer ever sees Θ in their place."""
    running = place.syncer(config(sync_every=4, overlap=0))
    ours, own = place.module(Regression), place.module(Regression)
    losses, own_losses = Losses(), Losses()
    saver = ModelCheckpoint(place.folder, filename="{step}", save_top_k=-1)
    options = {"val_check_interval": 6, "enable_checkpointing": True, "callbacks": [losses, saver]}
    one = place.trainer(validate_global=True, **options)
    one.fit(ours, place.samples(0, 12), place.validation())

    place.syncer(config(sync_every=4, overlap=0))
    other = place.trainer(val_check_interval=6, callbacks=[own_losses])
    other.fit(own, place.samples(0, 12), place.validation())
    assert_equal(values(ours), values(own))  # as without the option
    own_seen = [seen["val_loss"] for _, seen in own_losses.seen]
    assert [seen["val_loss"] for _, seen in losses.seen] == own_seen
    # merged at steps 4, 8, 12: at 6 Θ is two steps behind, at 12 the two are one
    (at_6, first), (_, last) = losses.seen
    assert first["global/val_loss"] != first["val_loss"]
    assert last["global/val_loss"] == last["val_loss"]
    assert_equal(checkpoint(place.folder / "step=6.ckpt")["state_dict"], at_6)
    place.assert_counted(running, 12, 48)


def monitor_logs(place):
    """Ordinary metrics, in the logger's file and in `callback_metrics`."""
    place.syncer(config(sync_every=4, overlap=0))
    options = {"callbacks": [DecoupledDiLoCoMonitor()], "log_every_n_steps": 1}
    logger = CSVLogger(place.folder, name="", version="")
    one = place.trainer(logger=logger, **options)
    one.fit(place.module(Regression), place.samples(0, 12))
    if not place.leads:
        return  # rank 0 alone logs
    seen = {name: float(value) for name, value in one.callback_metrics.items()}
    num_bytes = 4 * (3 * 5 + 5 + 5 + 1)
    assert seen["diloco/bytes_received"] == 4 * num_bytes  # the first Θ, and after each merge
    assert seen["diloco/bytes_sent"] == (1 + seen["diloco/contributions"]) * num_bytes
    assert seen["diloco/contributions"] >= 3 == seen["diloco/merged"]  # one may be asked for again
    assert (seen["diloco/staleness"], seen["diloco/version_gap"]) == (0, 0)
    assert seen["diloco/fragments"] == 4 and seen["diloco/boundary_ms"] > 0
    assert "diloco/version_gap" in (place.folder / "metrics.csv").read_text().splitlines()[0]


def command_line(place):
    """LightningCLI builds the strategy from the command line."""
    from lightning.pytorch.cli import LightningCLI

    running = place.syncer(config())
    options = {**QUIET, "devices": place.ranks, "max_steps": 4}
    given = [f"--trainer.{name}={str(value).lower()}" for name, value in options.items()]
    strategy = {"syncer": place.address(), "learner": "0", "inner": place.inner, "data": "none"}
    given.append("--trainer.strategy=dd_lightning.DecoupledDiLoCoStrategy")
    given.append(f"--data.ranks={place.ranks}")
    given += [f"--trainer.strategy.init_args.{name}={value}" for name, value in strategy.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", "fit", "--seed_everything=false", *given])
        LightningCLI(place.kind(Regression), Samples, save_config_callback=None)
    place.assert_counted(running, 4, 16)


class Samples(pl.LightningDataModule):
    """Batches of regression data."""

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def train_dataloader(self):
        return samples(0, 4 * self.ranks)


SCENARIOS = [
    Scenario("several_fits", "several fits with one Trainer", several_fits),
    Scenario(
        "evaluation",
        "`validate`, `test` and `predict` without a syncer",
        evaluation_without_a_syncer,
    ),
    Scenario(
        "nan_loss",
        "NaN loss: stays with its learner",
        nan_stays_with_its_learner,
        nan_in_a_run_with_a_group,
    ),
    Scenario(
        "resume",
        "checkpoints hold the sync state and resume, hyperparameters of Hydra's among them",
        checkpoint_resumes,
        ignore=("ignore:Checkpoint directory .* exists and is not empty",),
    ),
    Scenario(
        "averaged_end",
        "`WeightAveraging`: its average is not handed in",
        average_is_not_handed_in,
    ),
    Scenario(
        "validate_global", "`validate_global`: validation on the global weights", global_validation
    ),
    Scenario("monitor", "`DecoupledDiLoCoMonitor`", monitor_logs),
    Scenario("lightning_cli", "`LightningCLI`", command_line),
]
