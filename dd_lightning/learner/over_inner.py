"""Makes the strategy an object of two classes: ours, and that of the user's own strategy.

Its `__new__` is a base's, so that jsonargparse (LightningCLI) reads the arguments of `__init__`.
"""

from __future__ import annotations

from typing import Any, Self

from lightning.pytorch.strategies import Strategy

from dd_lightning.learner.inner import inner_strategy


class OverInner(Strategy):
    """Base of the strategy that users name, and of nothing else directly."""

    def __new__(
        cls, syncer: str | None = None, learner: Any = None, inner: Any = "auto", **_: Any
    ) -> Self:
        """An object of a class derived from `cls`; of `cls` itself where that is one of those:
        unpickling, or a derived class used directly."""
        if OverInner not in cls.__bases__:
            return object.__new__(cls)
        # imported here: its classes derive from the strategy, which derives from this one
        from dd_lightning.learner.inner_strategies import class_over

        base = inner_strategy(inner)
        strategy: Any = object.__new__(class_over(type(base)))
        strategy.__dict__.update(vars(base))  # every option of the user's strategy
        strategy._has_inner = True
        return strategy
