"""How many tokens a batch holds, for the weights of contributions and the ledger."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

ATTENTION_MASK, INPUT_IDS = "attention_mask", "input_ids"


class TokenCounter:
    """Order: the module's `count_tokens(batch)`, else the strategy's `tokens` callable, else the
    attention mask's sum, else the number of elements of `input_ids`, else the batch size."""

    def __init__(self, module: Any, tokens: Callable[[Any], int] | None) -> None:
        own = getattr(module, "count_tokens", None)
        self._count = own if callable(own) else tokens
        if callable(own) and tokens is not None:
            warnings.warn(
                "tokens=... has no effect: the module's own count_tokens(batch) comes first.",
                stacklevel=3,
            )
        self._warned = False

    def __call__(self, batch: Any) -> int:
        """Tokens of one micro-batch. Raises ValueError for a negative or fractional count."""
        if self._count is None:
            return self._guess(batch)
        given = self._count(batch)
        count = int(given)
        if count != given or count < 0:
            raise ValueError(
                f"the token count of a batch is {given!r}; allowed: an integer >= 0. Correct "
                "count_tokens(batch) of the module, or the strategy's tokens=..."
            )
        return count

    def _guess(self, batch: Any) -> int:
        if isinstance(batch, Mapping):
            mask, ids = batch.get(ATTENTION_MASK), batch.get(INPUT_IDS)
            if isinstance(mask, Tensor):
                return int(mask.sum())
            if isinstance(ids, Tensor):
                return ids.numel()
        size = _first_size(batch)
        if size is None:
            if not self._warned:
                warnings.warn(
                    f"no token count for a batch of {type(batch).__name__}: counting 1. Give the "
                    "module a count_tokens(batch) method, or the strategy tokens=callable.",
                    stacklevel=3,
                )
                self._warned = True
            return 1
        return size


def _first_size(batch: Any) -> int | None:
    """Size of dimension 0 of the first tensor with dimensions, depth first."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else None
    if isinstance(batch, Mapping):
        items = list(batch.values())
    elif isinstance(batch, list | tuple):
        items = list(batch)
    elif hasattr(batch, "__dataclass_fields__"):
        items = [getattr(batch, name) for name in batch.__dataclass_fields__]
    else:
        return None
    return next((size for item in items if (size := _first_size(item)) is not None), None)
