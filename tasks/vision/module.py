"""Image classification as an ordinary LightningModule."""

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch.nn.functional as F
from torch import Tensor

from dd_lightning.tasks.group_losses import log_group_losses
from dd_lightning.tasks.optimizer import OptimizerConfig, adamw, build_config

from .extra import require
from .networks import ARCHITECTURES


class VisionModule(pl.LightningModule):
    """Trains a classifier on batches `{"pixels": [B, 3, S, S], "labels": [B]}`.

    Logs `train_loss` per step; `val_loss` (nats) and `accuracy` (0..1), means over all validation
    pictures, and `validation_loss_class_<name>` with task.data.group_losses. A token of the ledger
    is a picture.

    Args:
        architecture: "vit" or "resnet"; the settings of the other one are not used.
        size: pixels of a side, S.
        classes: outputs.
        vit, resnet: fields of `ViTConfig` and `ResNetConfig`.
        optimizer: fields of `OptimizerConfig`.
    """

    def __init__(
        self,
        architecture: str = "vit",
        size: int = 8,
        classes: int = 10,
        vit: Mapping[str, Any] | None = None,
        resnet: Mapping[str, Any] | None = None,
        optimizer: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        vit, resnet, optimizer = dict(vit or {}), dict(resnet or {}), dict(optimizer or {})
        self.save_hyperparameters()  # plain dicts by now: checkpoints load with weights_only=True
        require("torchvision", "task.module")
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"task.module.architecture is {architecture!r}, allowed are {tuple(ARCHITECTURES)}"
            )
        fields = {"vit": vit, "resnet": resnet}
        configs = {
            name: build_config(kind, name, fields[name]) for name, kind in ARCHITECTURES.items()
        }
        self.network = configs[architecture].build(size, classes)
        self.optimizer_config = build_config(OptimizerConfig, "optimizer", optimizer)

    def configure_model(self) -> None:
        """Under Lightning's ModelParallelStrategy: FSDP2, the network as one unit."""
        if self.device_mesh is None:
            return
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if not isinstance(self.network, FSDPModule):  # a later fit calls this again
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[B, classes]`."""
        return self.network(pixels)

    @staticmethod
    def count_tokens(batch: Mapping[str, Tensor]) -> int:
        """Number of pictures in a batch."""
        return batch["labels"].numel()

    def training_step(self, batch: Mapping[str, Tensor], batch_index: int) -> Tensor:
        loss = F.cross_entropy(self.network(batch["pixels"]), batch["labels"])
        self.log("train_loss", loss.detach(), batch_size=batch["labels"].shape[0])
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_index: int) -> None:
        logits, labels = self.network(batch["pixels"]), batch["labels"]
        losses_B = F.cross_entropy(logits, labels, reduction="none")
        log_group_losses(self, losses_B, batch)
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.log_dict(
            {"val_loss": F.cross_entropy(logits, labels), "accuracy": accuracy},
            batch_size=labels.shape[0],
            sync_dist=True,
        )

    def configure_optimizers(self) -> dict[str, Any]:
        return adamw(self, self.optimizer_config)
