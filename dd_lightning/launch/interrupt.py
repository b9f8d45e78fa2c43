"""SIGINT and SIGTERM as a flag, for as long as a run lasts; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """`with Interrupt() as interrupt`: `interrupt.requested` turns true at the first signal.

    The second one raises KeyboardInterrupt. Outside the main thread (a sweeper's) Python allows no
    handlers: there `requested` stays false and the sweeper's own handling holds.
    """

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
