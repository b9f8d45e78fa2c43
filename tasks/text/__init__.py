"""Language modelling on bytes: a GPT LightningModule and a webdataset LightningDataModule."""

from dd_lightning.tasks.optimizer import OptimizerConfig

from .datamodule import TextDataModule
from .gpt import GPT, GPTConfig
from .module import GPTModule
from .moe import MoEConfig
from .moe_module import MoEModule
from .prepare import TextData, prepare

__all__ = [
    "GPT",
    "GPTConfig",
    "GPTModule",
    "MoEConfig",
    "MoEModule",
    "OptimizerConfig",
    "TextData",
    "TextDataModule",
    "prepare",
]
