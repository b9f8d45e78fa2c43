"""AdamW with warm-up and a schedule, as the tasks' modules use it, and the settings of a module."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW and its learning rate over optimizer steps.

    Args:
        lr: peak learning rate, reached after `warmup_steps` of linear growth.
        schedule: "cosine" falls to `lr * final_ratio` at `total_steps`; "constant" stays.
        total_steps: 0 takes the Trainer's own limit.
        weight_decay: on matrices only; norms are left alone.
    """

    lr: float = 4e-3
    schedule: str = "cosine"
    warmup_steps: int = 30
    total_steps: int = 0
    final_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"optimizer.lr is {self.lr!r}, allowed is lr > 0")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"optimizer.schedule is {self.schedule!r}, allowed are {SCHEDULES}")
        for name in ("warmup_steps", "total_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"optimizer.{name} is {getattr(self, name)!r}, allowed is >= 0")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"optimizer.{name} is {getattr(self, name)!r}, allowed is 0 <= {name} < 1"
                )
        if not 0 <= self.final_ratio <= 1:
            raise ValueError(
                f"optimizer.final_ratio is {self.final_ratio!r}, allowed is 0 <= final_ratio <= 1"
            )

    def factor(self, step: int, total_steps: int) -> float:
        """Learning rate of the step after `step` finished ones, as a share of `lr`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return 1.0
        progress = (step - self.warmup_steps) / max(1, total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_ratio + (1 - self.final_ratio) * cosine


def adamw(module: pl.LightningModule, config: OptimizerConfig) -> dict[str, Any]:
    """What `configure_optimizers` returns: AdamW on the trainable parameters, its rate per step.

    Raises:
        ValueError: a cosine without an end.
    """
    parameters = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
    total_steps = _total_steps(module, config) if config.schedule == "cosine" else 0
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: config.factor(step, total_steps)
    )
    return {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": schedule, "interval": "step"},
    }


def _total_steps(module: pl.LightningModule, config: OptimizerConfig) -> int:
    if config.total_steps:
        return config.total_steps
    steps = module.trainer.max_steps
    if steps < 0:
        steps = module.trainer.estimated_stepping_batches
    if not 0 < steps < math.inf:
        raise ValueError(
            f"optimizer.schedule=cosine needs to know where it ends, but the Trainer's number "
            f"of steps is {steps}: set Trainer(max_steps=...), optimizer.total_steps, or "
            "optimizer.schedule=constant"
        )
    return int(steps)


def build_config(config: type, name: str, fields: Mapping[str, Any]) -> Any:
    """A dataclass of settings from a mapping.

    Raises:
        ValueError: a field that it does not have, or one with a wrong value.
    """
    allowed = sorted(config.__dataclass_fields__)
    if unknown := sorted(set(fields) - set(allowed)):
        raise ValueError(f"{name} has no field {', '.join(unknown)}; allowed are {allowed}")
    return config(**fields)
