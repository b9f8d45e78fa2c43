"""The syncer's "dataset": jobs that the server thread puts in, in order, for Lightning's loop."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset

from dd_lightning.protocol.actions import Merge, WriteCheckpoint

STREAM_WAIT_S = 0.5  # bounds one wait for a job, so that signals are seen meanwhile

Job = Merge | WriteCheckpoint


class RoundStream(IterableDataset):
    """Yields jobs until `end` or `fail`; a job that is being done is not in the queue any more.

    Args:
        capacity: most jobs waiting. The core has at most one merge outstanding per fragment, and a
            checkpoint only while there is none, so P + 1 never fills.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._position = 0

    def put(self, job: Job) -> None:
        """Add a job; never blocks. After `end` or `fail` it is dropped."""
        with self._changed:
            if self._ended or self._error is not None:
                return
            assert len(self._jobs) < self._capacity, "the core issued more jobs than it may"
            self._jobs.append(job)
            self._changed.notify()

    def end(self) -> None:
        """No more jobs come; those in the queue are still done."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def fail(self, error: BaseException) -> None:
        """Raise `error` out of the loop before its next job."""
        with self._changed:
            self._error = error
            self._changed.notify()

    def __iter__(self) -> Iterator[Job]:
        while (job := self._next()) is not None:
            yield job

    def _next(self) -> Job | None:
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._jobs:
                    self._position += 1
                    return self._jobs.popleft()
                if self._ended:
                    return None
                self._changed.wait(STREAM_WAIT_S)

    @property
    def has_news(self) -> bool:
        """Whether the next job, the end or an error is there."""
        with self._changed:
            return bool(self._jobs) or self._ended or self._error is not None

    def __len__(self) -> int:
        # Lightning fetches one batch ahead of an iterable without a length, to know the last one:
        # each merge would then wait until the next is there. The end comes by StopIteration.
        return 1 << 40

    def state_dict(self) -> dict[str, Any]:
        """Jobs given out so far; having it also tells Lightning that resuming here is sound."""
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count on from there."""
        self._position = int(state["position"])
