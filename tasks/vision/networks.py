"""torchvision's VisionTransformer and ResNet classes at sizes for small pictures."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Sizes of a VisionTransformer (Dosovitskiy et al. 2021).

    Args:
        patch: pixels of a patch's side; divides the picture's.
        expansion: hidden features of a block's MLP, as a multiple of the width.
    """

    patch: int = 2
    width: int = 48
    depth: int = 3
    heads: int = 4
    expansion: int = 2

    def __post_init__(self) -> None:
        _positive(self, "vit")
        if self.width % self.heads:
            raise ValueError(
                f"vit.width {self.width} is not a multiple of vit.heads {self.heads}: each head "
                f"takes width/heads features; try width={self.heads * -(-self.width // self.heads)}"
            )

    def build(self, size: int, classes: int) -> nn.Module:
        """`[B, 3, size, size]` to `[B, classes]`."""
        from torchvision.models import VisionTransformer

        if size % self.patch:
            raise ValueError(
                f"vit.patch is {self.patch}, which does not divide task.data.size {size}: choose a "
                "divisor"
            )
        return VisionTransformer(
            image_size=size,
            patch_size=self.patch,
            num_layers=self.depth,
            num_heads=self.heads,
            hidden_dim=self.width,
            mlp_dim=self.expansion * self.width,
            num_classes=classes,
        )


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    """Sizes of a ResNet (He et al. 2016) with BatchNorm, in its shape for small pictures: three
    stages after a 3x3 stem that keeps the resolution.

    Args:
        width: features of the first stage; the others have twice and four times as many.
        depth: basic blocks (two convolutions each) of a stage.
    """

    width: int = 16
    depth: int = 1

    def __post_init__(self) -> None:
        _positive(self, "resnet")

    def build(self, size: int, classes: int) -> nn.Module:
        """`[B, 3, size, size]` to `[B, classes]`; any size of 4 or more."""
        from torchvision.models.resnet import BasicBlock, ResNet

        net = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=classes)
        # ImageNet's stem would leave a picture of 8 pixels 2, and its four stages start at 64
        # features: 4.9 million parameters.
        net.inplanes = self.width
        net.conv1 = nn.Conv2d(3, self.width, 3, padding=1, bias=False)
        net.bn1 = nn.BatchNorm2d(self.width)
        net.maxpool = nn.Identity()
        net.layer1 = net._make_layer(BasicBlock, self.width, self.depth)
        net.layer2 = net._make_layer(BasicBlock, 2 * self.width, self.depth, stride=2)
        net.layer3 = net._make_layer(BasicBlock, 4 * self.width, self.depth, stride=2)
        net.layer4 = nn.Identity()
        net.fc = nn.Linear(4 * self.width, classes)
        for module in net.modules():
            if isinstance(module, nn.Conv2d):  # as the class does with its own
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        return net


ARCHITECTURES: dict[str, type[ViTConfig] | type[ResNetConfig]] = {
    "vit": ViTConfig,
    "resnet": ResNetConfig,
}


def _positive(config: ViTConfig | ResNetConfig, name: str) -> None:
    for field in config.__dataclass_fields__:
        value = getattr(config, field)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}.{field} is {value!r}, allowed are integers >= 1")
