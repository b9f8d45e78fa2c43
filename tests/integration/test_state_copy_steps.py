"""A copy begun between two steps is of that moment, however late its thread begins."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch

from dd_lightning import DecoupledDiLoCoStrategy
from dd_lightning.learner.state_copy import BackgroundCopy
from dd_lightning.protocol.config import SyncerConfig
from tests.trainers import QUIET, Regression, loader

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


class Either(Regression):
    """Under automatic or manual optimization."""

    def __init__(self, automatic: bool) -> None:
        super().__init__(1)
        self.automatic_optimization = automatic

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


class Copier(pl.Callback):
    """Begins a copy after each batch, and remembers what it must become."""

    def __init__(self) -> None:
        self.begun: list[tuple[dict, BackgroundCopy]] = []

    def on_train_batch_end(self, trainer, module, *_: object) -> None:
        now = {name: p.detach().clone() for name, p in module.named_parameters()}
        copies = trainer.strategy._session.copies
        self.begun.append((now, copies.begin(dict(module.named_parameters()))))


@pytest.mark.parametrize("automatic", [True, False])
def test_the_next_step_and_the_next_apply_wait_for_the_copy(syncer, monkeypatch, automatic) -> None:
    monkeypatch.setattr(BackgroundCopy, "_run", lambda self: None)  # as late as can be
    algorithm = {"preset": "diloco", "fragments": 2, "sync_every": 2}
    syncer(SyncerConfig.load({"learners": 1, "algorithm": algorithm}))
    copier = Copier()
    strategy = DecoupledDiLoCoStrategy("tcp://127.0.0.1:1", learner="0")
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_steps=12, callbacks=[copier])
    trainer.fit(Either(automatic), loader())
    assert len(copier.begun) == 12
    for now, copy in copier.begun:
        found = copy.finish()
        assert all(torch.equal(found[name], now[name]) for name in now)
