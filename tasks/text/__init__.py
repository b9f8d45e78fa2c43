"""Language modelling on bytes: a GPT LightningModule and a webdataset LightningDataModule."""

from .datamodule import TextDataModule
from .gpt import GPT, GPTConfig
from .module import GPTModule, OptimizerConfig
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
