"""The mixture-of-experts GPT as a LightningModule: its training loss, and how experts are used."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dd_lightning.tasks.optimizer import build_config

from .gpt import GPT, GPTConfig
from .module import GPTModule
from .moe import MoEConfig, MoEMLP, Routing, balance_loss


class MoEModule(GPTModule):
    """`GPTModule` whose blocks hold experts instead of one MLP.

    Logs as `GPTModule` does, and `train_balance` (load-balancing loss, mean over blocks) and
    `train_expert_share_min` per step; over all validation tokens `expert_share_min` and
    `expert_share_max` (share of a block's choices that its least and most used expert had; even is
    1/E) and the share of every expert, `expert_share_b<block>_e<expert>`.

    Args:
        gpt: fields of `GPTConfig`.
        moe: fields of `MoEConfig`.
        optimizer: fields of `OptimizerConfig`.
    """

    def __init__(
        self,
        gpt: Mapping[str, Any] | None = None,
        moe: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        # plain dicts under these names: `save_hyperparameters` finds them here
        gpt, moe, optimizer = dict(gpt or {}), dict(moe or {}), dict(optimizer or {})
        self._moe = build_config(MoEConfig, "moe", moe)  # `build_model` needs it
        super().__init__(gpt, optimizer)
        self._counts: Tensor | None = None  # [blocks, E], of a validation under way

    def build_model(self, config: GPTConfig) -> GPT:
        return GPT(config, partial(MoEMLP, config=self._moe))

    def training_step(self, batch: Mapping[str, Tensor], batch_index: int) -> Tensor:
        loss = super().training_step(batch, batch_index)
        routings = self._take_routings()
        balance = torch.stack([balance_loss(routing) for routing in routings]).mean()
        self.log_dict(
            {
                "train_balance": balance.detach(),
                "train_expert_share_min": expert_shares(counts_of(routings)).min(),
            },
            batch_size=batch["labels"].shape[0],
        )
        return loss + self._moe.balance * balance

    def on_validation_epoch_start(self) -> None:
        self._counts = None

    def validation_step(self, batch: Mapping[str, Tensor], batch_index: int) -> None:
        super().validation_step(batch, batch_index)
        counts = counts_of(self._take_routings())
        self._counts = counts if self._counts is None else self._counts + counts

    def on_validation_epoch_end(self) -> None:
        if self._counts is None:
            return  # limit_val_batches=0
        # of all ranks before the minimum: that of a mean is not the mean of minima
        gathered = self.all_gather(self._counts).reshape(-1, *self._counts.shape)
        shares = expert_shares(gathered.sum(0))
        self.log_dict(
            {
                "expert_share_min": shares.min(),
                "expert_share_max": shares.max(),
                **{
                    f"expert_share_b{block}_e{expert}": share
                    for block, row in enumerate(shares)
                    for expert, share in enumerate(row)
                },
            }
        )
        self._counts = None

    def _take_routings(self) -> list[Routing]:
        return [block.mlp.take_routing() for block in self.model.blocks]


def counts_of(routings: list[Routing]) -> Tensor:
    """`[blocks, E]` int64: choices of each expert."""
    return torch.stack([routing.counts() for routing in routings])


def expert_shares(counts: Tensor) -> Tensor:
    """`[blocks, E]`: each row of counts as shares of its sum."""
    return counts / counts.sum(-1, keepdim=True)
