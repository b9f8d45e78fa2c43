"""Pictures and their names: contrastive pretraining, captioning, or both at once."""

from .datamodule import VisionLanguageDataModule
from .module import VisionLanguageModule
from .names import Tokenizer
from .prepare import VisionLanguageData

__all__ = ["Tokenizer", "VisionLanguageData", "VisionLanguageDataModule", "VisionLanguageModule"]
