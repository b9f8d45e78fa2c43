"""Registers "decoupled_diloco" with Lightning's strategies: now, or when Lightning is imported.

Importing Lightning takes seconds and hundreds of MB, which a proxy or a command line need not pay.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "decoupled_diloco"
_REGISTRY_HOME = "lightning.pytorch.strategies"


def register_strategy() -> None:
    """Register once; the strategy itself is imported when it is first asked for by name."""
    if _REGISTRY_HOME in sys.modules:
        _register(sys.modules[_REGISTRY_HOME])
    else:
        sys.meta_path.insert(0, _WhenImported())


def _register(strategies: ModuleType) -> None:
    registry = strategies.StrategyRegistry
    if NAME not in registry:
        registry.register(NAME, _make, description="one learner of a Decoupled DiLoCo run")


def _make(**options: Any) -> Any:
    from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy

    return DecoupledDiLoCoStrategy(**options)


class _WhenImported:
    """A finder that finds nothing itself: it adds one line to the end of one module's import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _REGISTRY_HOME:
            return None
        sys.meta_path.remove(self)  # once; the finders behind it do the finding
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            _register(module)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec
