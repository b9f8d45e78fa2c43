"""What every cell is compared with: plain Lightning and a callback that does DiLoCo with a barrier.

Nothing of the product but the names and the partition of the tensors. A step is what changed a
parameter, so that the product's counting is not compared with itself.
"""

from __future__ import annotations

import threading

import lightning.pytorch as pl
import torch

from dd_lightning.algorithm import balanced_fragments, canonical_name
from tests.trainers import WAIT_S

OUTER = {"lr": 0.7, "momentum": 0.9}


class Meeting:
    """Where the learners of one reference run put down what they hold."""

    def __init__(self, learners, sync_every, fragments):
        self.sync_every, self.fragments = sync_every, fragments
        self.held = [{} for _ in range(learners)]
        self.barrier = threading.Barrier(learners)

    def exchange(self, learner, values):
        """What all of them hold, in order of the learners."""
        self.held[learner] = values
        self.barrier.wait(WAIT_S)
        all_held = list(self.held)
        self.barrier.wait(WAIT_S)  # nobody puts down anything new before all have read
        return all_held


class PlainDiLoCo(pl.Callback):
    """Each learner keeps a copy of Θ of its own; equal sums make equal copies."""

    def __init__(self, meeting, learner):
        self.meeting, self.learner = meeting, learner
        self.steps = self.merges = 0

    def on_train_start(self, trainer, module):
        self.local = {canonical_name(n): p for n, p in module.named_parameters() if p.requires_grad}
        self.buffers = {
            canonical_name(n): b for n, b in module.named_buffers() if b.is_floating_point()
        }
        self.theta = {n: p.detach().float().clone() for n, p in self.local.items()}
        sizes = {n: p.numel() for n, p in self.local.items()}
        self.parts = balanced_fragments(sizes, self.meeting.fragments)
        self.outers = [
            torch.optim.SGD([self.theta[n] for n in part], nesterov=True, **OUTER)
            for part in self.parts
        ]
        self.fresh = set()  # fragments merged at the newest step
        self._remember()

    def on_train_batch_end(self, trainer, module, *_):
        if all(torch.equal(p, self.before[n]) for n, p in self.local.items()):
            return
        self.steps += 1
        self.fresh = set()
        meeting = self.meeting
        while self.steps * meeting.fragments >= (self.merges + 1) * meeting.sync_every:
            self._merge(self.merges % meeting.fragments)
            self.merges += 1
        self._remember()

    def _remember(self):
        self.before = {n: p.detach().clone() for n, p in self.local.items()}

    @torch.no_grad()
    def _merge(self, part):
        self.fresh.add(part)
        names = self.parts[part]
        mine = {n: self.local[n].detach().clone() for n in names}
        mine |= {n: b.clone() for n, b in self.buffers.items()}
        held = self.meeting.exchange(self.learner, mine)
        for name in names:
            base = self.theta[name].to(self.local[name].dtype).float()  # what a 16-bit learner had
            gradients = [(base - values[name].float()).double() for values in held]
            self.theta[name].grad = (sum(gradients) / len(gradients)).float()
        self.outers[part].step()
        for name in names:
            self.local[name].copy_(self.theta[name])
        for name, buffer in self.buffers.items():
            buffer.copy_(_mixture(name, held))


def _mixture(name, held):
    """Mean of a buffer; of a running variance, the variance of the mixture (`algorithm.md`)."""
    mean = sum(values[name].double() for values in held) / len(held)
    mean_name = name.replace("running_var", "running_mean")
    if mean_name == name:
        return mean
    means = [values[mean_name].double() for values in held]
    squares = sum(values[name].double() + m**2 for values, m in zip(held, means, strict=True))
    return squares / len(held) - (sum(means) / len(held)) ** 2
