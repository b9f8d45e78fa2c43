"""Rows of the table that are not one fit beside a plain one: each runs, and asserts, by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging
from lightning.pytorch.loggers import CSVLogger
from omegaconf import OmegaConf
from torch.optim.swa_utils import get_ema_avg_fn

from dd_lightning import DecoupledDiLoCoMonitor, DecoupledDiLoCoStrategy
from dd_lightning.protocol.config import SyncerConfig
from tests.conformance.feature import samples
from tests.conformance.runs import ADDRESS
from tests.trainers import QUIET, Regression, assert_equal, loader, run_threads, values

WAITING = {"preset": "diloco", "outer": {"lr": 1.0, "momentum": 0.0}}


@dataclass(frozen=True, slots=True)
class Scenario:
    """`run(inner, syncer, folder)` asserts; the other fields are `Feature`'s."""

    name: str
    title: str
    run: Callable[[str, Any, Path], None]
    ignore: tuple[str, ...] = ()
    needs: str = ""


def config(learners=1, **algorithm):
    """No round is due, unless `sync_every` is given."""
    algorithm = WAITING | {"sync_every": 1000} | algorithm
    return SyncerConfig.load({"algorithm": algorithm, "learners": learners})


def trainer(inner, learner="0", **options):
    """A learner's, of one epoch."""
    own = {"ckpt_weights_only": options.pop("ckpt_weights_only", None)}
    own["validate_global"] = options.pop("validate_global", False)
    strategy = DecoupledDiLoCoStrategy(ADDRESS, learner=learner, inner=inner, data="none", **own)
    return pl.Trainer(**{**QUIET, "max_epochs": 1, **options}, strategy=strategy)


def counted(running, learner="0"):
    """(steps, tokens) of a learner, its ledger checked."""
    (end,) = [
        s for s in running.events("state")
        if s["learner"] == learner and s["state"] == "finishing"
    ]  # fmt: skip
    (ledger,) = [e for e in running.events("ledger") if e["learner"] == learner]
    for row in ledger["fragments"]:
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
    return end["step"], ledger["fragments"][0]["processed"]


def assert_close(theta, weights):
    """Θ after one merge: Θ − (Θ − θ) is θ but for the rounding."""
    assert theta.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(theta[name], tensor, rtol=1e-6, atol=1e-6, msg=name)


def several_fits(inner, syncer, folder):
    """Each fit is a stay in a run of its own; what the Trainer counts goes on."""
    ours, plain = Regression(), Regression()
    one = trainer(inner)
    other = pl.Trainer(**{**QUIET, "max_epochs": 1})
    for fit in (1, 2, 3):
        running = syncer(config())
        one.fit_loop.max_epochs = other.fit_loop.max_epochs = fit
        one.fit(ours, samples(fit, 5))
        other.fit(plain, samples(fit, 5))
        assert counted(running) == (5, 20)
        assert_equal(values(ours), values(plain))
        assert_close(running.parameters(), values(plain))
    assert one.global_step == other.global_step == 15


def evaluation_without_a_syncer(inner, syncer, folder):
    """validate, test and predict open no connection, before a fit and after one."""
    running = syncer(config())
    module, one = Predicting(), trainer(inner)

    def check():
        running.reachable = False
        plain = pl.Trainer(**QUIET)
        for name in ("validate", "test"):
            ours = getattr(one, name)(module, loader(7), verbose=False)
            assert ours == getattr(plain, name)(module, loader(7), verbose=False)
        for mine, theirs in zip(
            one.predict(module, loader(7)), plain.predict(module, loader(7)), strict=True
        ):
            assert torch.equal(mine, theirs)
        running.reachable = True

    check()
    one.fit(module, samples(0, 4))
    assert counted(running) == (4, 16)
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


def nan_stays_with_its_learner(inner, syncer, folder):
    """Its contributions are refused, the other learner trains on, Θ is made of finite values."""
    running = syncer(config(2, preset="short_run", fragments=2, sync_every=4, min_learners=2))
    modules = [Regression(), Poisoned()]

    def learner(index):
        return lambda: trainer(inner, str(index)).fit(modules[index], samples(index, 120))

    run_threads(learner(0), learner(1))
    verdicts = {
        learner: [c["verdict"] for c in running.events("contribution") if c["learner"] == learner]
        for learner in ("0", "1")
    }
    assert "non-finite" in verdicts["1"] and "non-finite" not in verdicts["0"]
    assert verdicts["0"].count("accepted") >= 2
    for tensors in (values(modules[0]), running.parameters()):
        assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert counted(running, "0") == (120, 480)


def checkpoint_resumes(inner, syncer, folder):
    """The file holds the learner's counters; another process goes on from it, as plain Lightning
    does, and its steps count on from there."""
    syncer(config())
    saver = ModelCheckpoint(folder, filename="end")
    first = trainer(inner, callbacks=[saver], enable_checkpointing=True)
    module = Configured(OmegaConf.create({"lr": 0.05, "size": {"width": 5}}))
    first.fit(module, samples(0, 8))
    state = torch.load(folder / "end.ckpt", weights_only=False)["decoupled_diloco"]
    assert (state["step"], state["odometer"], state["data_position"]) == (8, 32, 8)

    running = syncer(config())
    ours, plain = Configured(module.hparams.settings), Regression()
    saver = ModelCheckpoint(folder, filename="after")  # Lightning wants all that has a state
    options = {"callbacks": [saver], "enable_checkpointing": True, "max_epochs": 2}
    second = trainer(inner, ckpt_weights_only=False, **options)
    second.fit(ours, samples(0, 8), ckpt_path=folder / "end.ckpt")
    pl.Trainer(**{**QUIET, "max_epochs": 2}).fit(plain, samples(0, 8))
    assert_equal(values(ours), values(plain))
    (join,) = running.events("join")
    assert (join["state_from"], join["state_step"], join["data_position"]) == ("checkpoint", 8, 8)
    assert counted(running) == (16, 32)
    assert second.global_step == 16


class Configured(Regression):
    """Its hyperparameters are Hydra's: a DictConfig, which a checkpoint then holds."""

    def __init__(self, settings):
        super().__init__(width=settings.size.width, lr=settings.lr)
        self.save_hyperparameters()


def average_is_not_handed_in(inner, syncer, folder):
    """WeightAveraging leaves its average in the module; Θ gets the weights of the last step."""
    running = syncer(config())
    ours, plain = Regression(), Regression()
    averaging = WeightAveraging(avg_fn=get_ema_avg_fn(0.5))
    trainer(inner, callbacks=[averaging]).fit(ours, samples(0, 8))
    pl.Trainer(**{**QUIET, "max_epochs": 1}).fit(plain, samples(0, 8))
    assert counted(running) == (8, 32)
    assert_close(running.parameters(), values(plain))
    assert not torch.equal(ours.net[0].weight, plain.net[0].weight)


class Losses(Callback):
    """At each validation: the weights it was made with, and both losses."""

    def __init__(self):
        self.seen = []

    def on_validation_end(self, trainer, module):
        losses = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.seen.append((values(module), losses))


def global_validation(inner, syncer, folder):
    """Θ and the learner's own weights, each under its name; the module keeps its own, and neither
    the checkpoint nor the syncer ever sees Θ in their place."""
    running = syncer(config(sync_every=4, overlap=0))
    ours, own = Regression(), Regression()
    losses = Losses()
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1)
    options = {"val_check_interval": 6, "enable_checkpointing": True, "callbacks": [losses, saver]}
    trainer(inner, validate_global=True, **options).fit(ours, samples(0, 12), loader(7))
    thetas = []

    class Watch(Callback):
        def on_validation_end(self, trainer, module):
            thetas.append({n: float(v) for n, v in trainer.callback_metrics.items()})

    syncer(config(sync_every=4, overlap=0))
    options = {"val_check_interval": 6, "callbacks": [Watch()]}
    trainer(inner, **options).fit(own, samples(0, 12), loader(7))
    assert_equal(values(ours), values(own))  # as without the option
    assert [seen["val_loss"] for _, seen in losses.seen] == [s["val_loss"] for s in thetas]
    # merged at steps 4, 8, 12: at 6 Θ is two steps behind, at 12 the two are one
    (at_6, first), (_, last) = losses.seen
    assert first["global/val_loss"] != first["val_loss"]
    assert last["global/val_loss"] == last["val_loss"]
    saved = torch.load(folder / "step=6.ckpt", weights_only=True)["state_dict"]
    assert_equal(saved, at_6)
    assert counted(running) == (12, 48)


def monitor_logs(inner, syncer, folder):
    """Ordinary metrics, in the logger's file and in `callback_metrics`."""
    syncer(config(sync_every=4, overlap=0))
    options = {"callbacks": [DecoupledDiLoCoMonitor()], "log_every_n_steps": 1}
    logger = CSVLogger(folder, name="", version="")
    one = trainer(inner, logger=logger, **options)
    one.fit(Regression(), samples(0, 12))
    seen = {name: float(value) for name, value in one.callback_metrics.items()}
    num_bytes = 4 * (3 * 5 + 5 + 5 + 1)
    assert seen["diloco/bytes_received"] == 4 * num_bytes  # the first Θ, and after each merge
    assert seen["diloco/bytes_sent"] == (1 + seen["diloco/contributions"]) * num_bytes
    assert seen["diloco/contributions"] >= 3 == seen["diloco/merged"]  # one may be asked for again
    assert (seen["diloco/staleness"], seen["diloco/version_gap"]) == (0, 0)
    assert seen["diloco/fragments"] == 4 and seen["diloco/boundary_ms"] > 0
    assert "diloco/version_gap" in (folder / "metrics.csv").read_text().splitlines()[0]


def command_line(inner, syncer, folder):
    """LightningCLI builds the strategy from its arguments."""
    from lightning.pytorch.cli import LightningCLI

    running = syncer(config())
    strategy = {
        "class_path": "dd_lightning.DecoupledDiLoCoStrategy",
        "init_args": {"syncer": ADDRESS, "learner": "0", "inner": inner},
    }
    LightningCLI(
        Regression,
        args=["fit"],
        trainer_defaults={**QUIET, "max_steps": 4, "strategy": strategy},
        datamodule_class=Samples,
        save_config_callback=None,
    )
    assert counted(running) == (4, 16)


class Samples(pl.LightningDataModule):
    """Batches of regression data."""

    def train_dataloader(self):
        return samples(0, 4)


SCENARIOS = [
    Scenario("several_fits", "several fits with one Trainer", several_fits),
    Scenario(
        "evaluation",
        "`validate`, `test` and `predict` without a syncer",
        evaluation_without_a_syncer,
    ),
    Scenario("nan_loss", "NaN loss: stays with its learner", nan_stays_with_its_learner),
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
    Scenario("lightning_cli", "`LightningCLI`", command_line, needs="jsonargparse"),
]
