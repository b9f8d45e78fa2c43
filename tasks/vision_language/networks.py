"""The networks of the task: torchvision's ViT as an encoder, a text encoder, a captioner.

Shape suffixes: B batch, P picture tokens, S text tokens, D width, E shared features, V vocabulary.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dd_lightning.tasks.text.gpt import GPT, GPTConfig
from dd_lightning.tasks.vision import ViTConfig


class PictureEncoder(nn.Module):
    """torchvision's VisionTransformer up to its head: `[B, 3, S, S]` to `[B, P, D]`, of which the
    first token is the class token."""

    def __init__(self, config: ViTConfig, size: int) -> None:
        super().__init__()
        self.vit = config.build(size, classes=1)
        self.vit.heads = nn.Identity()
        self.num_tokens = 1 + (size // config.patch) ** 2

    def forward(self, pixels: Tensor) -> Tensor:
        patches_BPD = self.vit._process_input(pixels)
        first_BPD = self.vit.class_token.expand(len(patches_BPD), -1, -1)
        return self.vit.encoder(torch.cat((first_BPD, patches_BPD), dim=1))


class TextEncoder(nn.Module):
    """Ids `[B, S]` to `[B, D]`: what a causal transformer knows at a name's end, as in CLIP. What
    follows the end has no part in it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gpt = GPT(config)
        self.gpt.head = nn.Identity()

    def forward(self, ids_BS: Tensor, end_B: Tensor) -> Tensor:
        return self.gpt(ids_BS)[torch.arange(len(ids_BS), device=ids_BS.device), end_B]


class Captioner(nn.Module):
    """A GPT that reads a picture's tokens, then spells its name: logits `[B, S, V]`, where those of
    place s have seen the ids before s."""

    def __init__(self, config: GPTConfig, picture_width: int) -> None:
        super().__init__()
        self.prefix = nn.Linear(picture_width, config.width)
        self.gpt = GPT(config)

    def forward(self, picture_BPD: Tensor, ids_BS: Tensor) -> Tensor:
        logits = self.gpt(ids_BS[:, :-1], self.prefix(picture_BPD))
        return logits[:, picture_BPD.shape[1] - 1 :]


@dataclass(frozen=True, slots=True)
class ContrastConfig:
    """Args:
    width: features that pictures and texts share, E.
    temperature: of the softmax at the start; learnt.
    min_temperature: where it stops falling.
    """

    width: int = 64
    temperature: float = 0.35
    min_temperature: float = 0.3

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"contrast.width is {self.width!r}, allowed are integers >= 1")
        if not 0 < self.min_temperature <= self.temperature <= 1:
            raise ValueError(
                f"contrast.temperature is {self.temperature!r}, allowed is "
                f"0 < min_temperature <= temperature <= 1 (min_temperature {self.min_temperature})"
            )


class Contrast(nn.Module):
    """Projections to shared features of length 1, and the inverse temperature, kept in bounds."""

    def __init__(self, config: ContrastConfig, picture_width: int, text_width: int) -> None:
        super().__init__()
        self.bounds = (0.0, -math.log(config.min_temperature))
        self.picture = nn.Linear(picture_width, config.width, bias=False)
        self.text = nn.Linear(text_width, config.width, bias=False)
        # one element, not none: FSDP shards no scalars
        self.log_scale = nn.Parameter(torch.full((1,), -math.log(config.temperature)))

    def forward(self, picture_BD: Tensor, text_BD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`[B, E]` of pictures, `[B, E]` of texts, inverse temperature `[1]`."""
        # in training `keep_in_bounds` does it: beyond a clamp there is no gradient
        log_scale = self.log_scale if self.training else self.log_scale.clamp(*self.bounds)
        picture_BE, text_BE = self.picture(picture_BD), self.text(text_BD)
        return F.normalize(picture_BE, dim=-1), F.normalize(text_BE, dim=-1), log_scale.exp()

    @torch.no_grad()
    def keep_in_bounds(self) -> None:
        """Before a training step; evaluation clamps, whatever Θ a merge has made."""
        self.log_scale.clamp_(*self.bounds)
