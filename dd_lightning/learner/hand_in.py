"""Hands in what no merge has, before any other callback's `on_train_end` changes the weights."""

from __future__ import annotations

from collections.abc import Callable

from lightning.pytorch import Callback, LightningModule, Trainer


class HandInFirst(Callback):
    """First of the Trainer's callbacks while it trains. WeightAveraging, for one, ends with its
    average in the module: handed in after that, the learner's last steps would be another's.

    Args:
        hand_in: the strategy's.
    """

    def __init__(self, hand_in: Callable[[], None]) -> None:
        self._hand_in = hand_in

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The last step is done."""
        self._hand_in()
