"""The Lightning callback that logs how a learner does in its run; strategies themselves log not."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy


class DecoupledDiLoCoMonitor(Callback):
    """Logs through `self.log`, so that loggers and `callback_metrics` have, of rank 0:

    `version_gap` (merges, over all fragments, that have come and are not applied), `staleness`
    (merges between base and round of the contribution merged last), `contributions` (sent, each as
    often as it was), `merged` (of them), `fragments` (of Θ that came), `bytes_sent` and
    `bytes_received` (payloads, since this fit began), `boundary_ms` (the last step boundary).

    Args:
        prefix: of the names.
    """

    def __init__(self, prefix: str = "diloco/") -> None:
        self.prefix = prefix

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Warns where it has nothing to log."""
        if stage == "fit" and not isinstance(trainer.strategy, DecoupledDiLoCoStrategy):
            warnings.warn(
                f"DecoupledDiLoCoMonitor has no effect under {type(trainer.strategy).__name__}: "
                "give the Trainer a DecoupledDiLoCoStrategy, or leave the callback out.",
                stacklevel=2,
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The figures as they are after this batch."""
        strategy = trainer.strategy
        if not isinstance(strategy, DecoupledDiLoCoStrategy) or not trainer.is_global_zero:
            return
        traffic, boundary_s = strategy.traffic, strategy.boundary_s
        now = traffic.figures
        found: dict[str, float | None] = {
            "version_gap": traffic.version_gap,
            "staleness": now.staleness,
            "contributions": now.contributions,
            "merged": now.merged,
            "fragments": now.fragments,
            "bytes_sent": now.bytes_sent,
            "bytes_received": now.bytes_received,
            "boundary_ms": None if boundary_s is None else 1000.0 * boundary_s,
        }
        for name, value in found.items():
            if value is not None:  # float32, whatever the module's precision makes the default
                figure = torch.tensor(value, dtype=torch.float32)
                pl_module.log(f"{self.prefix}{name}", figure, batch_size=1, rank_zero_only=True)
