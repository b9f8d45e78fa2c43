"""Losses of Θ: what the evaluator found, in the order of the checkpoints."""

from __future__ import annotations

from typing import Any

from dd_lightning.report.observer import Event, Observer, finite


class Losses(Observer):
    """Validation loss of Θ at version 0 and later, with the task's metrics of the newest."""

    def __init__(self) -> None:
        self.initial: float | None = None
        self.newest: Event | None = None

    def on_evaluation(self, event: Event) -> None:
        if event.get("initial"):
            self.initial = finite(event["loss"])
        elif self.newest is None or _age(event) >= _age(self.newest):
            self.newest = event

    @property
    def validation(self) -> float | None:
        """Loss at the end, or at the newest checkpoint that was evaluated; None without one."""
        return finite(self.newest["loss"]) if self.newest else None

    @property
    def metrics(self) -> dict[str, Any]:
        """The task's own figures of the same evaluation; those that are no number are null."""
        found = (self.newest or {}).get("metrics") or {}
        return {
            str(name): value if isinstance(value, bool | str) else whole_or_finite(value)
            for name, value in found.items()
        }


def whole_or_finite(value: Any) -> int | float | None:
    """An int stays one; a float must be finite; all else is None."""
    return value if isinstance(value, int) else finite(value)


def _age(event: Event) -> tuple[bool, float]:
    """The final evaluation is the newest, else the one of the youngest checkpoint."""
    at = finite(event.get("checkpoint_t_s"))
    return bool(event.get("final")), event["t_s"] if at is None else at
