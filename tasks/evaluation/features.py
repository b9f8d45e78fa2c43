"""Texts as a language model sees them: the mean of its last hidden states over their tokens.

Shape suffixes: R texts, W windows, S tokens of a window, D width.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

BATCH = 64  # texts


def pooled(module: nn.Module, texts: Sequence[np.ndarray], length: int) -> Tensor:
    """`[R, D]`: the mean hidden state of each text, with a gradient.

    Args:
        module: has `features(ids [W, S])`, the last hidden states `[W, S, D]`, each of the tokens
            up to its own.
        texts: tokens of each, at least one.
        length: longest window that the model takes, in tokens; a longer text is read in several.
    """
    windows = [
        (number, tokens[start : start + length])
        for number, tokens in enumerate(texts)
        for start in range(0, len(tokens), length)
    ]
    size = max(len(tokens) for _, tokens in windows)
    ids_WS = torch.zeros(len(windows), size, dtype=torch.long)  # padded behind, where none looks
    mask_WS = torch.zeros(len(windows), size)
    for row, (_, tokens) in enumerate(windows):
        ids_WS[row, : len(tokens)] = torch.from_numpy(tokens.astype(np.int64))
        mask_WS[row, : len(tokens)] = 1.0
    sums_WD = (module.features(ids_WS).float() * mask_WS[..., None]).sum(1)
    of_text_W = torch.tensor([number for number, _ in windows])
    sums_RD = torch.zeros(len(texts), sums_WD.shape[1]).index_add(0, of_text_W, sums_WD)
    return sums_RD / torch.tensor([[len(tokens)] for tokens in texts])


@torch.no_grad()
def frozen_features(module: nn.Module, texts: Sequence[np.ndarray], length: int) -> Tensor:
    """`[R, D]`: the same of many texts, of the model as it is."""
    module.eval()
    by_length = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    rows: list[Tensor] = [torch.empty(0)] * len(texts)
    for start in range(0, len(by_length), BATCH):
        chosen = by_length[start : start + BATCH]
        for i, row in zip(chosen, pooled(module, [texts[i] for i in chosen], length), strict=True):
            rows[i] = row
    return torch.stack(rows)
