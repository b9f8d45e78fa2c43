"""Learners as real threads whose random numbers are their own, as in processes.

Threads share a process's generators. So they take turns: a learner runs with its own states in
place and gives its turn away where it waits for the syncer, never in the middle of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest

from dd_lightning.learner.comm import CommThread
from dd_lightning.simulate.random_state import RandomState
from tests.trainers import WAIT_S


class Turns:
    """Whose turn it is among some threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock, self._own = threading.Lock(), threading.local()
        real_next = CommThread.next

        def next_of_mine(comm: CommThread, timeout_s: float) -> Any:
            if timeout_s <= 0:
                return real_next(comm, timeout_s)
            with self.away():
                return real_next(comm, timeout_s)

        monkeypatch.setattr(CommThread, "next", next_of_mine)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """This thread's turn, whenever it is not away."""
        self._own.random = RandomState.current()
        self._take()
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Others have their turn."""
        self._own.random = RandomState.current()
        self._lock.release()
        try:
            yield
        finally:
            self._take()

    def _take(self) -> None:
        assert self._lock.acquire(timeout=WAIT_S), "another learner keeps its turn"
        self._own.random.restore()


class InOrder(pl.Callback):
    """The next learner begins when this one has joined; no step is made before all have."""

    def __init__(self, turns: Turns, joined: threading.Event, barrier: threading.Barrier) -> None:
        self._turns, self._joined, self._barrier = turns, joined, barrier

    def on_train_start(self, *_: Any) -> None:
        self._joined.set()
        with self._turns.away():
            self._barrier.wait(WAIT_S)
