"""Image classification: torchvision's ViT and ResNet, pictures in webdataset shards."""

from .datamodule import VisionDataModule
from .module import VisionModule
from .networks import ResNetConfig, ViTConfig
from .prepare import VisionData

__all__ = ["ResNetConfig", "ViTConfig", "VisionData", "VisionDataModule", "VisionModule"]
