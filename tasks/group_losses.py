"""Validation loss of each group of the data (era, class, library), as `validation_loss_<group>`."""

import lightning.pytorch as pl
from torch import Tensor

GROUP, GROUP_NAMES = "group", "group_names"  # of a validation batch, see `ShardDataModule`


def log_group_losses(module: pl.LightningModule, losses_B: Tensor, batch: dict) -> None:
    """Log the mean loss of each group's samples, over the whole validation; nothing where the batch
    does not say its samples' groups.

    Args:
        losses_B: loss of each sample, `[B]`.
        batch: its `group` holds numbers `[B]` of `group_names`.
    """
    if GROUP not in batch:
        return
    for number, name in enumerate(batch[GROUP_NAMES]):
        chosen = batch[GROUP] == number
        # every rank logs every group in every batch, also with weight 0: their sums are exchanged
        mean = (losses_B * chosen).sum() / chosen.sum().clamp(min=1)
        module.log(f"validation_loss_{name}", mean, batch_size=int(chosen.sum()), sync_dist=True)
