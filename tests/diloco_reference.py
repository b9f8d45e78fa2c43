"""What the strategy is compared with, bit for bit: plain loops without anything of ours."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn

from dd_lightning.algorithm import balanced_fragments
from tests.trainers import values

RECURRENCE = [1, -1, -3, -11, -13, -15, -17, -19, -21, -35]  # of `Ramp`, from algorithm.md


class MergeAlone(pl.Callback):
    """θ ← Θ − (Θ − θ), Θ ← θ every `every` steps."""

    def __init__(self, every):
        self.every = every

    def on_train_start(self, trainer, module):
        self.theta = values(module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step % self.every == 0:
            for name, parameter in module.state_dict().items():
                self.theta[name] -= self.theta[name] - parameter
                parameter.copy_(self.theta[name])


def reference(modules, loaders, steps, sync_every, fragments, overlap):
    """Streaming DiLoCo (P = 1, τ = 0: DiLoCo) of equal learners, in plain torch."""
    names = [name for name, _ in modules[0].named_parameters()]
    sizes = {name: parameter.numel() for name, parameter in modules[0].named_parameters()}
    parts = balanced_fragments(sizes, fragments)
    locals_ = [dict(module.named_parameters()) for module in modules]
    theta = {name: locals_[0][name].detach().clone() for name in names}
    outers = [
        torch.optim.SGD([theta[n] for n in part], lr=0.7, momentum=0.9, nesterov=True)
        for part in parts
    ]
    inners = [module.configure_optimizers() for module in modules]
    batches = [[b for _ in range(9) for b in data] for data in loaders]
    under_way, next_round = [], 1
    for step in range(1, steps + 1):
        for module, inner, data in zip(modules, inners, batches, strict=True):
            inner.zero_grad()
            module.training_step(data[step - 1], 0).backward()
            inner.step()
        while step * fragments >= next_round * sync_every:
            part = (next_round - 1) % fragments
            taken = [{n: local[n].detach().clone() for n in parts[part]} for local in locals_]
            under_way.append((step, part, taken))
            next_round += 1
        while under_way and step >= under_way[0][0] + overlap:
            _, part, taken = under_way.pop(0)
            for name in parts[part]:
                gradients = [(theta[name] - values[name]).double() for values in taken]
                theta[name].grad = (sum(gradients) / len(gradients)).float()
            outers[part].step()
            for local in locals_:
                for name in parts[part]:
                    local[name].data.copy_(theta[name])
    return theta


class Ramp(pl.LightningModule):
    """Two scalars that start at 1 and lose 2 per step."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.a.item())
        return self.a + self.b

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=2.0)
