"""Small modules, one for each thing that a LightningModule may do; no global random numbers."""

from __future__ import annotations

from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.trainers import Regression


def drawn(module, seed=0):
    """The module, its parameters drawn by a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return module


class Small(Regression):
    """`Regression` whose network is `build()`."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.lr = 0.05
        self.net = drawn(self.build())

    def build(self):
        return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr, momentum=0.5)


class Overflowing(Regression):
    """Its gradients overflow in every third step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx % 3 == 0 else loss


class Manual(Regression):
    """Manual optimization with one optimizer, clipped by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        self.clip_gradients(optimizer, 0.1, "norm")
        optimizer.step()


class TwoOptimizers(Manual):
    """SGD for one layer in every batch, Adam for the other in every second."""

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        self.manual_backward(Regression.training_step(self, batch, batch_idx))
        first.step()
        if batch_idx % 2:
            second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self):
        first = torch.optim.SGD(self.net[0].parameters(), lr=0.05)
        return [first, torch.optim.Adam(self.net[2].parameters(), lr=0.01)]


class CompiledInside(Small):
    """The network alone is compiled: its names have `_orig_mod` in them."""

    def build(self):
        return torch.compile(super().build(), backend="eager")


class ByStep(Regression):
    """Learning rate halved every 5 optimizer steps."""

    interval, every = "step", 5

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, self.every, 0.5)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]


class ByEpoch(ByStep):
    """Halved after each epoch."""

    interval, every = "epoch", 1


class Checkpointed(Small):
    """Activations are made again in the backward pass."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = checkpoint(self.net[0], x, use_reentrant=False)
        return nn.functional.mse_loss(self.net[2](self.net[1](hidden)), y)


class Adapted(Small):
    """A frozen network with a low-rank adapter beside its first layer."""

    def build(self):
        net = super().build()
        net.requires_grad_(False)
        self.down, self.up = drawn(nn.Linear(3, 1, bias=False), 1), drawn(nn.Linear(1, 5), 2)
        return net

    def training_step(self, batch, batch_idx):
        x, y = batch
        hidden = self.net[0](x) + self.up(self.down(x))
        return nn.functional.mse_loss(self.net[2](self.net[1](hidden)), y)


class TiedWeights(Small):
    """One matrix as the embedding and as the head."""

    def build(self):
        net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7, bias=False)})
        net["head"].weight = net["embed"].weight
        return net

    def training_step(self, batch, batch_idx):
        ids = batch[0][:, 0].abs().mul(3).long() % 7
        return nn.functional.cross_entropy(self.net["head"](self.net["embed"](ids)), (ids + 1) % 7)


class Normed(Small):
    """BatchNorm: its running statistics travel, the count of its batches does not."""

    def build(self):
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 1))


class ConfiguredLate(Small):
    """Its parameters are made in `configure_model`."""

    def __init__(self):
        pl.LightningModule.__init__(self)
        self.lr, self.net = 0.05, None

    def configure_model(self):
        if self.net is None:
            self.net = drawn(self.build())


class Watched(Regression):
    """Logs what callbacks look at."""

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("steps_done", float(self.trainer.global_step))


class Sentences(Dataset):
    """`batches` times 4 sentences of 6, 5, 3 and 2 tokens, padded; as a tokenizer makes them."""

    def __init__(self, learner, batches):
        generator = torch.Generator().manual_seed(learner)
        self.ids = torch.randint(1, 16, (4 * batches, 6), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = (torch.arange(6) < (6, 5, 3, 2)[index % 4]).long()
        ids = self.ids[index] * mask
        labels = torch.where(mask == 1, ids, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def sentences(learner, batches):
    """Batches of 16 tokens."""
    return DataLoader(Sentences(learner, batches), batch_size=4)


class CausalModel(nn.Module):
    """Called as a model of `transformers` is: named tensors in, an object with `.loss` out."""

    def __init__(self):
        super().__init__()
        self.embed, self.lm_head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.lm_head(self.embed(input_ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def gpt2():
    """The smallest GPT-2 of `transformers`, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


class LanguageModel(Small):
    """A model of Hugging Face's calling convention inside a LightningModule."""

    def build(self):
        return CausalModel()

    def training_step(self, batch, batch_idx):
        return self.net(**batch).loss


class PretrainedModel(LanguageModel):
    """The same with a model of `transformers`."""

    def build(self):
        return gpt2()
