"""A learner that starts late has the learning rate of one that was there all along."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as lrs

from dd_lightning.learner import schedules
from tests.trainers import QUIET, loader

pytestmark = pytest.mark.unit

SCHEDULES = {
    "lambda": lambda opt: lrs.LambdaLR(opt, lambda step: 1 / (1 + step)),
    "cosine": lambda opt: lrs.CosineAnnealingLR(opt, 100),
    "restarts": lambda opt: lrs.CosineAnnealingWarmRestarts(opt, 7, 2),
    "one_cycle": lambda opt: lrs.OneCycleLR(opt, 0.1, total_steps=100),
    "sequential": lambda opt: lrs.SequentialLR(
        opt, [lrs.LinearLR(opt, 0.1, total_iters=5), lrs.CosineAnnealingLR(opt, 90)], [5]
    ),
    "chained": lambda opt: lrs.ChainedScheduler(
        [lrs.ExponentialLR(opt, 0.99), lrs.StepLR(opt, 10)]
    ),
}


class Net(pl.LightningModule):
    def __init__(self, make, **options):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.make, self.options, self.rates = make, options, []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [{"scheduler": self.make(optimizer), **self.options}]


def fit(module, steps, late=0, **options):
    class Late(pl.Callback):
        def on_train_start(self, trainer, module):
            schedules.advance(trainer, late)

    trainer = pl.Trainer(**QUIET, max_steps=steps, callbacks=[Late()], **options)
    trainer.fit(module, loader(rows=40))  # 10 batches an epoch; pytest makes warnings errors
    return module.rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_is_exactly_that_of_the_step_it_starts_at(name):
    undisturbed = fit(Net(SCHEDULES[name], interval="step"), 30)
    late = fit(Net(SCHEDULES[name], interval="step"), 7, late=23)
    assert late == undisturbed[23:]


@pytest.mark.parametrize(
    ("options", "every"),
    [
        ({"interval": "epoch"}, 1),
        ({"interval": "epoch", "frequency": 2}, 1),
        ({"interval": "step", "frequency": 3}, 1),
        ({"interval": "step", "frequency": 2}, 4),
        ({"interval": "epoch"}, 4),
    ],
)
def test_intervals_frequencies_and_accumulation_are_lightnings(options, every):
    make = SCHEDULES["lambda"]
    fit_options = {"accumulate_grad_batches": every}
    per_epoch = -(-10 // every)
    steps = 4 * per_epoch  # late learners begin with a whole epoch, so positions agree
    undisturbed = fit(Net(make, **options), steps + 2, **fit_options)
    late = fit(Net(make, **options), 2, late=steps, **fit_options)
    assert late[0] == undisturbed[4 * 10]


def test_a_scheduler_that_watches_a_metric_starts_anew_and_says_so():
    module = Net(lambda opt: lrs.ReduceLROnPlateau(opt), monitor="x", strict=False)
    trainer = pl.Trainer(**QUIET, max_steps=1)

    class Late(pl.Callback):
        def on_train_start(self, trainer, module):
            with pytest.warns(UserWarning, match="ReduceLROnPlateau starts anew"):
                schedules.advance(trainer, 10)

    trainer.callbacks.append(Late())
    trainer.fit(module, loader(rows=40))
    assert module.rates == [0.05]
