"""What follows a join: callbacks hear of it, and training data is made for the given data slot."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class AfterJoin(Protocol):
    """A callback that is called once this learner has joined, before any training data is made."""

    def on_joined(self, trainer: Any) -> None:
        """The data slot and position are known."""
        ...


def tell(trainer: Any) -> None:
    """Callbacks first; then a loader that was made only to count steps is given up."""
    for callback in trainer.callbacks:
        if isinstance(callback, AfterJoin):
            callback.on_joined(trainer)
    trainer.fit_loop._combined_loader = None  # Lightning makes it when it is None
