"""Real Trainers that make their steps as something else goes on beside them, part by part."""

from __future__ import annotations

import threading

from dd_lightning import DecoupledDiLoCoStrategy
from tests.trainers import WAIT_S, StartTogether, fit_plain, loader

FREE_STEPS = 10  # at the start


class Gate:
    """How many of `parts` are done. Step 10 + k comes after part k; what is left comes freely."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.done = 0
        self.reached = 0  # the step of the faster learner
        self._changed = threading.Condition()

    def wait_for(self, step: int) -> None:
        """A learner has done so many steps."""
        with self._changed:
            self.reached = max(self.reached, step)
            self._changed.notify_all()
            part = min(self.parts, max(0, step - FREE_STEPS))
            assert self._changed.wait_for(lambda: self.done >= part, WAIT_S)

    def open(self) -> None:
        """One more part is done."""
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def open_all(self) -> None:
        """Nothing more comes; the learners are not kept."""
        with self._changed:
            self.done = self.parts
            self._changed.notify_all()

    def wait_until_training(self) -> None:
        """A learner has made a step after its first."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.reached > 1, WAIT_S)


class Paced(StartTogether):
    """Its learner's steps wait for the gate."""

    def __init__(self, barrier: threading.Barrier, gate: Gate) -> None:
        super().__init__(barrier)
        self.gate = gate

    def on_train_batch_end(self, trainer, module, *_) -> None:
        self.gate.wait_for(trainer.global_step)


def train(
    module, index: int, steps: int, address: str, callback: Paced, key: str | None = None
) -> None:
    """One learner's fit, on its own data."""
    strategy = DecoupledDiLoCoStrategy(address, learner=str(index), data="none", key=key)
    fit_plain(module, loader(index), steps, strategy, [callback])
