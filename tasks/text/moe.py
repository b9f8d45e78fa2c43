"""Mixture of experts in the GPT's place of the MLP: top-k routing (Shazeer et al. 2017).

Shape suffixes: T tokens of a batch, K choices a token, E experts, D width.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import GPTConfig, dense_mlp


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Experts of each block.

    Args:
        experts: MLPs of a block, E.
        top_k: experts that a token passes through.
        expansion: hidden features of an expert, as a multiple of the width. With 4 / `top_k` a
            token costs what it does in the dense GPT.
        balance: weight of the load-balancing loss in the training loss.
    """

    experts: int = 4
    top_k: int = 2
    expansion: int = 2
    balance: float = 0.01

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "expansion"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"moe.{name} is {value!r}, allowed are integers >= 1")
        if self.experts < 2:
            raise ValueError(
                "moe.experts is 1, allowed are integers >= 2; for one expert, the dense GPT, use "
                "task=text"
            )
        if self.top_k > self.experts:
            raise ValueError(
                f"moe.top_k is {self.top_k}, allowed are 1..moe.experts = 1..{self.experts}"
            )
        if self.balance < 0:
            raise ValueError(f"moe.balance is {self.balance!r}, allowed is balance >= 0")


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router decided for the tokens of one batch.

    Args:
        probability_TE: softmax over all experts.
        chosen_TK: the experts of each token, most probable first.
        weight_TK: their probabilities, scaled to sum to 1.
    """

    probability_TE: Tensor
    chosen_TK: Tensor
    weight_TK: Tensor

    def counts(self) -> Tensor:
        """`[E]` int64: how many of the T x K choices fell on each expert."""
        return torch.bincount(self.chosen_TK.flatten(), minlength=self.probability_TE.shape[1])


def route(logits_TE: Tensor, top_k: int) -> Routing:
    """The `top_k` most probable experts of each token; in float32 under any precision."""
    probability_TE = F.softmax(logits_TE.float(), dim=-1)
    top_TK, chosen_TK = probability_TE.topk(top_k, dim=-1)
    return Routing(probability_TE, chosen_TK, top_TK / top_TK.sum(-1, keepdim=True))


def balance_loss(routing: Routing) -> Tensor:
    """Load-balancing loss (Fedus et al. 2021, eq. 4): E x sum over experts of (share of the
    choices x mean probability); 1 where both are even, E where one expert takes all.

    Of the tokens at hand alone: neither ranks nor learners are asked, so that a learner balances
    its experts on its own data and needs nobody for it.
    """
    share_E = routing.counts() / routing.chosen_TK.numel()  # no gradient: a count
    return len(share_E) * (share_E * routing.probability_TE.mean(0)).sum()


class MoEMLP(nn.Module):
    """A router and E MLPs; the output is the weighted sum of a token's `top_k` experts.

    No token is dropped: there is no capacity limit, so a token's output depends on itself alone.
    """

    def __init__(self, gpt: GPTConfig, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(gpt.width, config.experts, bias=False)
        self.experts = nn.ModuleList(
            dense_mlp(gpt, config.expansion) for _ in range(config.experts)
        )
        self.routing: Routing | None = None  # of the last forward, until it is taken

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_TD = x_BSD.flatten(0, -2)
        routing = self.routing = route(self.router(x_TD), self.top_k)
        # Tokens sorted by expert, each expert once: also one without tokens, so that all parameters
        # have gradients in every step (DDP waits for each, AdamW decays each).
        order = routing.chosen_TK.flatten().argsort(stable=True)
        parts = x_TD[order // self.top_k].split(routing.counts().tolist())
        sorted_D = torch.cat([mlp(part) for mlp, part in zip(self.experts, parts, strict=True)])
        y_TKD = sorted_D[order.argsort()].unflatten(0, (-1, self.top_k))
        return (y_TKD * routing.weight_TK[..., None].to(y_TKD.dtype)).sum(1).view_as(x_BSD)

    def take_routing(self) -> Routing:
        """What the last forward decided; kept no longer, since it holds that step's graph."""
        assert self.routing is not None, "no forward since it was taken last"
        routing, self.routing = self.routing, None
        return routing
