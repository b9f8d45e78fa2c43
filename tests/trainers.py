"""Real Trainers with the strategy, as threads of the test's process."""

from __future__ import annotations

import threading

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WAIT_S = 60.0  # on every wait of one thread for another: loose, for a busy machine

QUIET = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "max_epochs": -1,
}


class Regression(pl.LightningModule):
    """A two-layer network on fixed random data; tensors of its own generator, no global RNG."""

    def __init__(self, seed=0, width=5, lr=0.05):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


def loader(seed=0, rows=64, batch_size=4, shuffle=False):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 3, generator=generator)
    y = torch.randn(rows, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, shuffle=shuffle)


def values(module):
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def fit_plain(module, data, steps, strategy, callbacks=()):
    """One fit of so many steps."""
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_steps=steps, callbacks=list(callbacks))
    trainer.fit(module, data)


class StartTogether(pl.Callback):
    """No learner makes its first step before all have joined."""

    def __init__(self, barrier):
        self.barrier = barrier

    def on_train_start(self, trainer, module):
        self.barrier.wait(WAIT_S)


def run_threads(*functions):
    """Run them at the same time; the first error is raised here."""
    errors = []

    def guarded(function):
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(1.5 * WAIT_S)
        assert not thread.is_alive(), "a learner does not end"
    if errors:
        raise errors[0]
