"""What every cell is compared with: plain Lightning and a callback that does DiLoCo with a barrier.

Nothing of the product but the names and the partition of the tensors. A step is what changed a
parameter, so that the product's counting is not compared with itself.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

import lightning.pytorch as pl
import torch
from torch import Tensor

from dd_lightning.algorithm import balanced_fragments, canonical_name
from tests.conformance.sharding import in_full, put, whole
from tests.trainers import WAIT_S

OUTER = {"lr": 0.7, "momentum": 0.9}


class Meeting:
    """Where the learners of one reference run put down what they hold."""

    def __init__(self, learners, sync_every, fragments):
        self.sync_every, self.fragments = sync_every, fragments
        self.held = [{} for _ in range(learners)]
        self.barrier = threading.Barrier(learners)
        self.end = None

    def sum(self, number):
        """Over the ranks of a learner."""
        return number

    def exchange(self, learner, values):
        """What all of them hold, in order of the learners."""
        self.held[learner] = values
        self.barrier.wait(WAIT_S)
        all_held = list(self.held)
        self.barrier.wait(WAIT_S)  # nobody puts down anything new before all have read
        return all_held

    def ended(self, end):
        """What the reference of any learner is left with: they are equal."""
        self.end = end


@dataclass(frozen=True, slots=True)
class ReferenceEnd:
    """Inner steps and merges, and Θ by name as far as it was merged at the last step."""

    steps: int
    merges: int
    theta: Mapping[str, Tensor]


class PlainDiLoCo(pl.Callback):
    """Each learner (of a group, each rank) keeps a copy of Θ; equal sums make equal copies."""

    def __init__(self, meeting, learner):
        self.meeting, self.learner = meeting, learner
        self.steps = self.merges = 0

    def on_train_start(self, trainer, module):
        with in_full(trainer.strategy.model):
            self._begin(self._parameters(module))

    def _parameters(self, module):
        return {canonical_name(n): p for n, p in module.named_parameters() if p.requires_grad}

    def _begin(self, local):
        self.theta = {n: whole(p).float().clone() for n, p in local.items()}
        sizes = {n: p.numel() for n, p in local.items()}
        self.parts = balanced_fragments(sizes, self.meeting.fragments)
        self.outers = [
            torch.optim.SGD([self.theta[n] for n in part], nesterov=True, **OUTER)
            for part in self.parts
        ]
        self.fresh = set()  # fragments merged at the newest step
        self.since = [[0, 0] for _ in self.parts]  # tokens and steps since a fragment's last merge
        self.unstepped = 0  # tokens
        self._remember(local)

    def on_train_batch_end(self, trainer, module, outputs, batch, *_):
        self.unstepped += self.meeting.sum(num_tokens(batch))
        with in_full(trainer.strategy.model):
            local = self._parameters(module)
            if not all([torch.equal(whole(p), self.before[n]) for n, p in local.items()]):
                self._step(module, local)

    def _step(self, module, local):
        self.steps += 1
        for since in self.since:
            since[0] += self.unstepped
            since[1] += 1
        self.unstepped = 0
        self.fresh = set()
        meeting = self.meeting
        while self.steps * meeting.fragments >= (self.merges + 1) * meeting.sync_every:
            self._merge(self.merges % meeting.fragments, module, local)
            self.merges += 1
        self._remember(local)

    def on_train_end(self, trainer, module):
        theta = {name: self.theta[name] for part in self.fresh for name in self.parts[part]}
        self.meeting.ended(ReferenceEnd(self.steps, self.merges, theta))

    def _remember(self, local):
        self.before = {n: whole(p).clone() for n, p in local.items()}

    @torch.no_grad()
    def _merge(self, part, module, local):
        self.fresh.add(part)
        names = self.parts[part]
        buffers = {canonical_name(n): b for n, b in module.named_buffers() if b.is_floating_point()}
        mine = {n: whole(local[n]).clone() for n in names}
        mine |= {n: b.clone() for n, b in buffers.items()}
        tokens, steps = self.since[part]
        self.since[part] = [0, 0]
        held, weights = zip(
            *self.meeting.exchange(self.learner, (mine, tokens**2 / steps)), strict=True
        )
        for name in names:
            base = self.theta[name].to(local[name].dtype).float()  # what a 16-bit learner had
            gradients = [(base - values[name].float()).double() for values in held]
            self.theta[name].grad = _average(gradients, weights).float()
        self.outers[part].step()
        for name in names:
            put(local[name], self.theta[name])
        for name, buffer in buffers.items():
            buffer.copy_(_mixture(name, held, weights))


def num_tokens(batch):
    """Of an attention mask, or samples."""
    return int(batch["attention_mask"].sum()) if isinstance(batch, dict) else len(batch[0])


def _average(tensors, weights):
    return sum(w * t for t, w in zip(tensors, weights, strict=True)) / sum(weights)


def _mixture(name, held, weights):
    """Mean of a buffer; of a running variance, the variance of the mixture (`algorithm.md`)."""
    mean = _average([values[name].double() for values in held], weights)
    mean_name = name.replace("running_var", "running_mean")
    if mean_name == name:
        return mean
    means = [values[mean_name].double() for values in held]
    squares = [values[name].double() + m**2 for values, m in zip(held, means, strict=True)]
    return _average(squares, weights) - _average(means, weights) ** 2
