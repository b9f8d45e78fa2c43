"""Decoupled DiLoCo for PyTorch Lightning: one model, independent learners, nobody waits.

`import dd_lightning` registers the strategy "decoupled_diloco" with Lightning, without importing
Lightning itself: the proxy, the command line and the protocol start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dd_lightning.registration import register_strategy

if TYPE_CHECKING:
    from dd_lightning.learner.monitor import DecoupledDiLoCoMonitor
    from dd_lightning.learner.strategy import DecoupledDiLoCoStrategy
    from dd_lightning.protocol.config import SyncerConfig
    from dd_lightning.syncer.module import SyncerModule

__all__ = ["DecoupledDiLoCoMonitor", "DecoupledDiLoCoStrategy", "SyncerConfig", "SyncerModule"]

_HOMES = {
    "DecoupledDiLoCoMonitor": "dd_lightning.learner.monitor",
    "DecoupledDiLoCoStrategy": "dd_lightning.learner.strategy",
    "SyncerConfig": "dd_lightning.protocol.config",
    "SyncerModule": "dd_lightning.syncer.module",
}

register_strategy()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
