"""GPT language modelling as an ordinary LightningModule."""

import math
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor

from dd_lightning.tasks.group_losses import log_group_losses
from dd_lightning.tasks.optimizer import OptimizerConfig, adamw, build_config

from .gpt import GPT, Block, GPTConfig


class GPTModule(pl.LightningModule):
    """Trains a GPT on batches `{"input_ids": [B, S], "labels": [B, S]}` of token ids.

    Logs `train_loss` per step; `val_loss` (nats a token, mean over all validation tokens),
    `bits_per_byte` (of their text, to compare tokenizers by: a token is one byte unless the batch
    has `num_bytes`), and `validation_loss_<group>` where the data tells its groups apart.

    Args:
        gpt: fields of `GPTConfig`.
        optimizer: fields of `OptimizerConfig`.
    """

    unit_classes = (Block,)  # what `learner=fsdp` shards as units

    def __init__(
        self, gpt: Mapping[str, Any] | None = None, optimizer: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__()
        gpt, optimizer = dict(gpt or {}), dict(optimizer or {})
        self.save_hyperparameters()  # plain dicts by now: checkpoints load with weights_only=True
        self.model = self.build_model(build_config(GPTConfig, "gpt", gpt))
        self.optimizer_config = build_config(OptimizerConfig, "optimizer", optimizer)

    def build_model(self, config: GPTConfig) -> GPT:
        """The network that is trained; a variant replaces it."""
        return GPT(config)

    def configure_model(self) -> None:
        """Under Lightning's ModelParallelStrategy: FSDP2, one unit a block and one for the rest."""
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.model, FSDPModule):  # a later fit calls this again
            for unit in (*self.model.blocks, self.model):
                fully_shard(unit, mesh=self.device_mesh["data_parallel"])

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.model(ids_BS)

    def features(self, ids_BS: Tensor) -> Tensor:
        """Last hidden states `[B, S, D]`: what other tasks may learn from."""
        return self.model.features(ids_BS)

    @staticmethod
    def count_tokens(batch: Mapping[str, Tensor]) -> int:
        """Number of target tokens in a batch."""
        return batch["labels"].numel()

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Mean cross-entropy of the next token, in nats."""
        logits_BSV = self.model(batch["input_ids"])
        return F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch: Mapping[str, Tensor], batch_index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss.detach(), batch_size=batch["labels"].shape[0])
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_index: int) -> None:
        logits_BSV = self.model(batch["input_ids"])
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), batch["labels"].flatten())
        losses_BS = F.cross_entropy(logits_BSV.mT, batch["labels"], reduction="none")
        log_group_losses(self, losses_BS.mean(-1), batch)
        labels = batch["labels"]
        # every sequence has the same length, so weights by sequences are weights by tokens
        self.log("val_loss", loss, batch_size=labels.shape[0], sync_dist=True)
        count = int(batch["num_bytes"].sum()) if "num_bytes" in batch else labels.numel()
        bits = loss * labels.numel() / count / math.log(2)
        self.log("bits_per_byte", bits, batch_size=count, sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw(self, self.optimizer_config)
