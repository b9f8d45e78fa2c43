"""SIGTERM to a learner that is a group: all ranks stop after the same step.

Lightning's own handler issues a collective wherever the training thread happens to be, which meets
whatever collective the others are in. Ours only notes the signal; the next boundary shares it.
"""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from lightning.pytorch.trainer.connectors.signal_connector import _HandlersCompose


class SharedStop:
    """Of one rank."""

    def __init__(self, trainer: Any) -> None:
        self._noted = False
        self._connector = trainer._signal_connector

    @property
    def told(self) -> bool:
        """Whether this process got SIGTERM; the others know from the next boundary on."""
        return self._noted or self._connector.received_sigterm

    def listen(self) -> None:
        """Take the place of Lightning's handler, which it has registered by now; others stay."""
        registered = signal.getsignal(signal.SIGTERM)
        if not isinstance(registered, _HandlersCompose):
            return  # not in the main thread: nobody gets signals here
        registered.signal_handlers = [
            self._note if handler == self._connector._sigterm_notifier_fn else handler
            for handler in registered.signal_handlers
        ]

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True

    def obey(self) -> None:
        """Lightning's loop ends before the next batch, on every rank."""
        self._connector.received_sigterm = True
