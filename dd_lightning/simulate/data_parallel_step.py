"""A Lightning strategy whose step is that of M members: each computes the gradient of its own batch
with the same parameters, and one optimizer step is made with their mean.

Every member counts alike, as in DDP: its mean over its own batch, whatever its tokens. All else is
the Trainer's: precision, clipping, accumulation, schedules, callbacks. Hooks that are given a batch
by the training loop (`on_train_batch_start`, `_end`) get the number of the step instead of M.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from dd_lightning.learner.tokens import TokenCounter
from dd_lightning.simulate.data_parallel_member import Buffers, Member
from dd_lightning.simulate.random_state import RandomState


class Tickets:
    """What the Trainer takes for its training data: a number for each micro-batch, without end."""

    def __iter__(self) -> Iterator[Tensor]:
        number = 0
        while True:
            yield torch.tensor(number)
            number += 1

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the members keep their own positions."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


class JobData(pl.LightningDataModule):
    """The Trainer's datamodule: tickets to train with, the first member's data to validate with.

    Its state is that of all members: the positions in their data and their random states.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__()
        self._members = members
        self._restored: list[dict[str, Any]] | None = None

    def setup(self, stage: str) -> None:
        for member in self._members:
            member.data.trainer = self.trainer
            member.data.setup(stage)

    def train_dataloader(self) -> Tickets:
        return Tickets()

    def val_dataloader(self) -> Any:
        data = self._members[0].data
        return data.val_dataloader() if is_overridden("val_dataloader", data) else []

    def state_dict(self) -> dict[str, Any]:
        self._members[0].random = RandomState.current()  # its own, outside of a step
        return {"members": [member.state() for member in self._members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict["members"]

    def begin(self) -> bool:
        """The members begin; whether at the state of a checkpoint."""
        for member in self._members:
            member.begin(None if self._restored is None else self._restored[member.index])
        return self._restored is not None


class DataParallelStep(SingleDeviceStrategy):
    """Makes the steps of a job.

    Args:
        members: all that the job may have.
        next_step: called before each optimizer step; the numbers of those that make it.

    Raises:
        ValueError: the module optimizes by itself, or returns no loss.
    """

    def __init__(
        self,
        members: Sequence[Member],
        next_step: Callable[[], Sequence[int]],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(device)
        self.members = members
        self._next_step = next_step
        self._present: list[Member] = []
        self._tokens: TokenCounter | None = None
        self._ticket = -1
        self._micro = -1  # of the step under way, from 0
        self._batches: dict[int, Any] = {}
        self._aside: list[tuple[Tensor, Tensor]] = []  # gradients of all members but the last

    # ------------------------------------------------------------------ Lightning's

    def batch_to_device(self, batch: Any, *arguments: Any, **keywords: Any) -> Any:
        """A ticket stays where it is."""
        if self.lightning_module.trainer.training:
            return batch
        return super().batch_to_device(batch, *arguments, **keywords)

    def training_step(self, ticket: Tensor, *arguments: Any, **keywords: Any) -> Any:
        """All members' forward passes, and all backward passes but the last, which is Lightning's.

        Its gradients are added to the others' in `backward`. The first member comes last, since
        what its forward pass leaves in the module's buffers and random states is what stays.
        """
        self._begin(int(ticket))
        outside = RandomState.current() if len(self.members) > 1 else None
        if outside is not None:
            self.members[0].random = outside
        first = self._present[0]
        others = self._present[1:]
        buffers = Buffers(self.lightning_module) if others else None
        if self._micro == 0 and others:
            self._clear_gradients()
        total = 0.0
        for member in others:
            output = self._forward(member, arguments, keywords)
            loss = _loss(output) / len(self._present)
            loss = loss / self.lightning_module.trainer.accumulate_grad_batches
            self.backward(loss, None, last=False)
            total += member_loss(output)
            assert buffers is not None  # there are others
            buffers.put_back()
        if self._micro == 0 and others:
            self._put_aside()
        output = self._forward(first, arguments, keywords)
        if outside is not None:
            self.members[0].random.restore()
        return _shared(output, total, len(self._present))

    def backward(
        self, closure_loss: Tensor, optimizer: Any, *arguments: Any, last: bool = True, **more: Any
    ) -> Tensor:
        """Lightning's, once the others' gradients lie where they are added to."""
        if last:
            for parameter, gradient in self._aside:
                parameter.grad = gradient
            self._aside = []
        return super().backward(closure_loss, optimizer, *arguments, **more)

    # ------------------------------------------------------------------ parts of it

    def _begin(self, ticket: int) -> None:
        """Who takes part, and their batches; an optimizer that looks twice gets the same."""
        if ticket == self._ticket:
            return
        self._ticket = ticket
        trainer = self.lightning_module.trainer
        self._micro = (self._micro + 1) % trainer.accumulate_grad_batches
        if self._micro == 0:
            self._present = [self.members[index] for index in self._next_step()]
            for member in self._present:
                member.begin_step()
        self._batches.clear()

    def _forward(self, member: Member, arguments: Any, keywords: Any) -> Any:
        swaps = len(self.members) > 1
        if swaps:
            member.random.restore()
        is_new = member.index not in self._batches
        if is_new:
            trainer = self.lightning_module.trainer
            self._batches[member.index] = member.next_batch(trainer)
        batch = self._batches[member.index]
        output = super().training_step(batch, *arguments, **keywords)
        if swaps:
            member.random = RandomState.current()
        if is_new:
            if self._tokens is None:
                self._tokens = TokenCounter(self.lightning_module, None)
            member.count(self._tokens(batch), member_loss(output))
        return output

    def _clear_gradients(self) -> None:
        """Those of the step before: Lightning clears them only after `training_step`."""
        for parameter in self.lightning_module.parameters():
            parameter.grad = None

    def _put_aside(self) -> None:
        for parameter in self.lightning_module.parameters():
            if parameter.grad is not None:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {type(output).__name__} without a loss; allowed under "
            "algorithm=data_parallel: a loss, or a mapping with one, from every member and step "
            "(and automatic_optimization)."
        )
    return loss


def member_loss(output: Any) -> float:
    """The value of a member's loss."""
    return float(_loss(output).detach())


def _shared(output: Any, others: float, count: int) -> Any:
    """The last member's output, with the mean loss of all as its value, and its own gradient."""
    loss = _loss(output) / count + others / count
    return {**output, "loss": loss} if isinstance(output, Mapping) else loss
