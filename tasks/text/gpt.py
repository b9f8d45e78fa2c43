"""A small decoder-only transformer (pre-norm, GELU MLP) in plain PyTorch.

Shape suffixes: B batch, S sequence, D width, N heads, H head width, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS = ("rope", "learned")
# GPT-2's 0.02 suits wide models; at these widths signals that start so small cost hundreds of steps
# and make them depend on the seed. Tied embeddings of 1/sqrt(width) would start at a high loss.
EMBEDDING_STD = 0.05


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes and options of a `GPT`.

    Args:
        max_length: longest sequence it accepts, in tokens.
        positions: "rope" rotates queries and keys (Su et al. 2021); "learned" adds an embedding.
        tie_embeddings: input embedding and output projection share one tensor.
        dropout: probability on attention, MLP and embedding; 0 keeps a run free of random draws.
    """

    vocabulary: int = 256
    max_length: int = 128
    width: int = 128
    depth: int = 4
    heads: int = 4
    positions: str = "rope"
    tie_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocabulary", "max_length", "width", "depth", "heads"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"gpt.{name} is {value!r}, allowed are integers >= 1")
        if self.width % self.heads:
            raise ValueError(
                f"gpt.width {self.width} is not a multiple of gpt.heads {self.heads}: each head "
                f"takes width/heads features; try width={self.heads * -(-self.width // self.heads)}"
            )
        if self.positions not in POSITIONS:
            raise ValueError(f"gpt.positions is {self.positions!r}, allowed are {POSITIONS}")
        if self.positions == "rope" and (self.width // self.heads) % 2:
            raise ValueError(
                f"gpt.positions=rope rotates pairs of features, but a head has "
                f"{self.width // self.heads} (width {self.width} / heads {self.heads}): make it "
                "even, or use positions=learned"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"gpt.dropout is {self.dropout!r}, allowed is 0 <= dropout < 1")


def rope_tables(length: int, head_width: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of position x frequency, each `[length, head_width / 2]` (Su et al. 2021,
    eq. 15)."""
    frequency = base ** (-torch.arange(0, head_width, 2, dtype=torch.float32) / head_width)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def apply_rope(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Rotate feature pairs (h, h + H/2) by their position's angle; tables hold H/2 columns."""
    first, second = x_BNSH.chunk(2, dim=-1)
    return torch.cat((first * cos_SH - second * sin_SH, second * cos_SH + first * sin_SH), dim=-1)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.output = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, length, width = x_BSD.shape
        qkv = self.query_key_value(x_BSD).view(batch, length, 3, self.heads, width // self.heads)
        q_BNSH, k_BNSH, v_BNSH = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if rope is not None:
            q_BNSH, k_BNSH = apply_rope(q_BNSH, *rope), apply_rope(k_BNSH, *rope)
        mixed_BNSH = F.scaled_dot_product_attention(
            q_BNSH,
            k_BNSH,
            v_BNSH,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
        )
        return self.output(mixed_BNSH.transpose(1, 2).reshape(batch, length, width))


def dense_mlp(config: GPTConfig, expansion: int = 4) -> nn.Sequential:
    """A GELU MLP of `expansion` times the width; its last layer adds to the residual stream."""
    return nn.Sequential(
        nn.Linear(config.width, expansion * config.width, bias=False),
        nn.GELU(),
        nn.Linear(expansion * config.width, config.width, bias=False),
    )


class Block(nn.Module):
    """Attention, then an MLP; each on a normalised input."""

    def __init__(self, config: GPTConfig, mlp: nn.Module) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_mlp = nn.LayerNorm(config.width)
        self.mlp = mlp
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x_BSD = x_BSD + self.dropout(self.attention(self.norm_attention(x_BSD), rope))
        return x_BSD + self.dropout(self.mlp(self.norm_mlp(x_BSD)))


class GPT(nn.Module):
    """Next-token logits for token ids: `[B, S]` integers in, `[B, S, V]` out.

    A prefix of `[B, P, D]` vectors stands before the ids; then logits are `[B, P + S, V]`.

    Args:
        mlp: makes each block's MLP, `[B, S, D]` to `[B, S, D]`, of one or more `dense_mlp`.
    """

    def __init__(
        self, config: GPTConfig, mlp: Callable[[GPTConfig], nn.Module] = dense_mlp
    ) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        if config.positions == "learned":
            self.position = nn.Embedding(config.max_length, config.width)
        else:
            cos, sin = rope_tables(config.max_length, config.width // config.heads)
            # not persistent: recomputed, so neither checkpointed nor exchanged between learners
            self.register_buffer("rope_cos", cos, persistent=False)
            self.register_buffer("rope_sin", sin, persistent=False)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, mlp(config)) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(_initialise)
        for block in self.blocks:  # the residual stream sums 2 x depth outputs (GPT-2)
            mlps = [m for m in block.mlp.modules() if isinstance(m, nn.Sequential)]
            for linear in (block.attention.output, *(m[2] for m in mlps)):
                linear.weight.data /= math.sqrt(2 * config.depth)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, ids_BS: Tensor, prefix_BPD: Tensor | None = None) -> Tensor:
        return self.head(self.features(ids_BS, prefix_BPD))

    def features(self, ids_BS: Tensor, prefix_BPD: Tensor | None = None) -> Tensor:
        """Last hidden states `[B, P + S, D]`, each of the tokens up to its own."""
        x_BSD = self.embedding(ids_BS)
        if prefix_BPD is not None:
            x_BSD = torch.cat((prefix_BPD, x_BSD), dim=1)
        length = x_BSD.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"a sequence of {length} tokens is longer than gpt.max_length "
                f"{self.config.max_length}: raise it, or lower task.data.sequence_length"
            )
        rope = None
        if self.config.positions == "learned":
            x_BSD = x_BSD + self.position.weight[:length]
        else:
            rope = (self.rope_cos[:length], self.rope_sin[:length])
        x_BSD = self.dropout(x_BSD)
        for block in self.blocks:
            x_BSD = block(x_BSD, rope)
        return self.norm(x_BSD)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
