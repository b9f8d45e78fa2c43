"""Where a learner lives: its clock, the name of its process life, its way to the syncer.

Real learners have sockets and a thread for them; the simulator brings a virtual clock and channel.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Protocol

from dd_lightning.learner.comm import Channel, CommThread
from dd_lightning.learner.dialing import Dialer
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import TensorInfo


class Surroundings(Protocol):
    """What a session needs of the world; `DecoupledDiLoCoStrategy.surroundings` replaces it."""

    def now(self) -> float:
        """Seconds, monotonic."""
        ...

    def incarnation(self) -> str:
        """A new name for this process life."""
        ...

    def comm(self, link: LearnerLink, tensors: tuple[TensorInfo, ...]) -> CommThread:
        """Drives `link`; not started."""
        ...


class Sockets:
    """The real ones.

    Args:
        dialer: makes, for the module's tensors, what dials the syncer.
    """

    def __init__(self, dialer: Callable[[tuple[TensorInfo, ...]], Callable[[], Channel]]) -> None:
        self._dialer = dialer

    def now(self) -> float:
        """`time.monotonic`."""
        return time.monotonic()

    def incarnation(self) -> str:
        """A random one."""
        return uuid.uuid4().hex

    def comm(self, link: LearnerLink, tensors: tuple[TensorInfo, ...]) -> CommThread:
        """A thread over real channels."""
        dial = self._dialer(tensors)
        if isinstance(dial, Dialer):
            dial.follow(lambda: link.timeouts)
        return CommThread(link, dial, tensors)
