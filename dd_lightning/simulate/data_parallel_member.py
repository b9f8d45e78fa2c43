"""A member of a data-parallel job: its part of the data, its random states, its present step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from dd_lightning.learner.rng import restore_rng, rng_states
from dd_lightning.simulate.random_state import RandomState


class Member:
    """One member; it has the data slot that the learner of its number would have.

    Args:
        data: of its own. Where it has no state of its own, a job that goes back to a checkpoint
            begins the data anew, as Lightning does.
        random: as its process would begin.
    """

    def __init__(self, index: int, data: pl.LightningDataModule, random: RandomState) -> None:
        self.index, self.data, self.random = index, data, random
        self.tokens = 0  # of the step under way
        self.loss = 0.0  # the sum over its micro-batches
        self.batches = 0  # in it
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None

    def begin(self, state: Mapping[str, Any] | None) -> None:
        """Its process begins, at the state of a checkpoint if there is one."""
        self._loader = self._batches = None
        if state is None:
            return
        ours = RandomState.current()
        self.data.load_state_dict(dict(state["data"]))
        self._iterate()  # first: beginning to iterate draws a seed, which was drawn long ago
        restore_rng(state["random"])
        self.random = RandomState.current()
        ours.restore()

    def _iterate(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = self.data.train_dataloader()
        self._batches = iter(self._loader)
        return self._batches

    def state(self) -> dict[str, Any]:
        """For a checkpoint: plain values and tensors."""
        ours = RandomState.current()
        self.random.restore()
        random = rng_states()
        ours.restore()
        return {"data": self.data.state_dict(), "random": random}

    def next_batch(self, trainer: pl.Trainer) -> Any:
        """Draw one and bring it to the device, through the hooks that Lightning calls."""
        try:
            batch = next(self._iterate() if self._batches is None else self._batches)
        except StopIteration:  # a new epoch of its own
            batch = next(self._iterate())
        module = trainer.lightning_module
        batch = trainer.precision_plugin.convert_input(batch)
        batch = self._owner("on_before_batch_transfer", module).on_before_batch_transfer(batch, 0)
        owner = self._owner("transfer_batch_to_device", module)
        batch = owner.transfer_batch_to_device(batch, trainer.strategy.root_device, 0)
        return self._owner("on_after_batch_transfer", module).on_after_batch_transfer(batch, 0)

    def _owner(self, hook: str, module: pl.LightningModule) -> Any:
        """The datamodule where it has this hook, else the module; as Lightning decides."""
        return self.data if is_overridden(hook, self.data) else module

    def begin_step(self) -> None:
        """Nothing is counted of the next step yet."""
        self.tokens, self.loss, self.batches = 0, 0.0, 0

    def count(self, tokens: int, loss: float) -> None:
        """One micro-batch of the step."""
        self.tokens += tokens
        self.loss += loss
        self.batches += 1

    @property
    def mean_loss(self) -> float:
        """Over the micro-batches of the step."""
        return self.loss / max(1, self.batches)


class Buffers:
    """A module's buffers, put back after each member but the first, whose buffers count: as DDP
    broadcasts rank 0's before each forward. Copied whole: BatchNorm's writing leaves no trace."""

    def __init__(self, module: nn.Module) -> None:
        self._kept = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def put_back(self) -> None:
        """As they were when this was made."""
        with torch.no_grad():
            for buffer, value in self._kept:
                buffer.copy_(value)
