"""Which optimizer steps really happened, on how many tokens, with which loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dd_lightning.learner.tokens import TokenCounter


class StepCounter:
    """Counts micro-batches and optimizer steps between boundaries.

    A step is real if an optimizer's post-step hook fired, the gradient scaler's scale did not
    drop (a fused optimizer's hook fires in skipped steps too) and, under automatic optimization,
    at least one `training_step` returned a loss. Tokens of a skipped step count with the next.

    Args:
        batches: micro-batches that were drawn in earlier lives.
    """

    def __init__(
        self,
        tokens: TokenCounter,
        optimizers: Sequence[Optimizer],
        scaler: Any,
        *,
        automatic: bool,
        batches: int = 0,
    ) -> None:
        self.batches = batches
        self._tokens, self._scaler, self._automatic = tokens, scaler, automatic
        self._pending_tokens = self._since_step = 0
        self._loss: Any = None
        self._fired = self._has_loss = False
        self._scale = self._current_scale()
        self._hooks = [opt.register_step_post_hook(self._on_step) for opt in optimizers]

    def _on_step(self, *_: Any) -> None:
        self._fired = True

    def saw(self, batch: Any, output: Any) -> None:
        """A micro-batch went through `training_step`."""
        self.batches += 1
        self._since_step += 1
        self._pending_tokens += self._tokens(batch)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            self._loss, self._has_loss = loss.detach(), True

    def has_stepped(self) -> bool:
        """Whether a real step happened since the last call."""
        scale, self._scale = self._scale, self._current_scale()
        dropped = scale is not None and self._scale is not None and self._scale < scale
        stepped = self._fired and not dropped and (self._has_loss or not self._automatic)
        self._fired = self._has_loss = False
        return stepped

    @property
    def step_is_open(self) -> bool:
        """A step has been made whose boundary is still to come."""
        return self._fired

    @property
    def in_the_middle(self) -> bool:
        """Gradients of earlier batches are being accumulated, or their step was skipped."""
        return self._since_step > 0

    def take(self) -> tuple[int, float | None]:
        """(tokens since the last real step, the last loss)."""
        tokens, self._pending_tokens, self._since_step = self._pending_tokens, 0, 0
        loss, self._loss = self._loss, None
        return tokens, None if loss is None else float(loss.float().mean())

    def close(self) -> None:
        """Take the hooks off the optimizers."""
        for hook in self._hooks:
            hook.remove()

    def _current_scale(self) -> float | None:
        enabled = self._scaler is not None and self._scaler.is_enabled()
        return float(self._scaler.get_scale()) if enabled else None
