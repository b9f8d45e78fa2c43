"""A learner as a process of its own: `python -m tests.learner_process ADDRESS ID ...`.

Prints "training" after its first step; ends when the syncer says so, or with an exception.
"""

import argparse
import time

import lightning.pytorch as pl

from dd_lightning import DecoupledDiLoCoStrategy
from tests.trainers import QUIET, Regression, loader


class Tell(pl.Callback):
    """Says when it trains; a step takes at least so long."""

    def __init__(self, step_s):
        self.step_s = step_s

    def on_train_batch_end(self, trainer, *_):
        time.sleep(self.step_s)
        if trainer.global_step == 1:
            print("training", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("learner")
    parser.add_argument("--width", type=int, default=5, help="of the model")
    parser.add_argument("--connect-timeout", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.0)
    arguments = parser.parse_args()
    strategy = DecoupledDiLoCoStrategy(
        arguments.address,
        learner=arguments.learner,
        connect_timeout=arguments.connect_timeout,
    )
    tell = Tell(arguments.step_s)
    trainer = pl.Trainer(**QUIET, strategy=strategy, max_steps=-1, callbacks=[tell])
    trainer.fit(Regression(width=arguments.width), loader())
