"""Messages in virtual time over the proxy's own lanes, pump and link model (`network/`).

A connection of the virtual channel is made of these: one flow in each direction. Without a model
(`network=none`) a message is there at the instant it is sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dd_lightning.network.connection import SOCKET_BUFFER_BYTES
from dd_lightning.network.lane import Flow, Lane
from dd_lightning.network.link import Path
from dd_lightning.network.pump import Pump
from dd_lightning.simulate.virtual_time import Action, VirtualTime

BOUNDLESS = 2**62  # bytes: who sends asks `is_free`


@dataclass(slots=True)
class _Alarm:
    """An event that can be called off."""

    at_s: float
    is_on: bool = True

    def when(self) -> float:
        return self.at_s

    def cancel(self) -> None:
        self.is_on = False


class PumpClock:
    """Virtual time, as the pump asks an asyncio loop for it."""

    def __init__(self, time: VirtualTime) -> None:
        self._time = time

    def time(self) -> float:
        """Now, s."""
        return self._time.now

    def call_at(self, when: float, callback: Callable[[], Any]) -> _Alarm:
        """Let it happen then, unless it is called off."""
        alarm = _Alarm(when)

        def ring() -> None:
            if alarm.is_on:
                callback()

        self._time.at(when, ring)
        return alarm


class MessageFlow(Protocol):
    """One direction of one connection."""

    num_sent_bytes: int
    num_arrived_bytes: int
    num_lost_bytes: int

    @property
    def is_free(self) -> bool:
        """Whether everything given has left."""

    def send(self, num_bytes: int, arrived: Action) -> None:
        """Put so many bytes on their way; `arrived` is called when the last of them has come."""

    def when_free(self, action: Action) -> None:
        """Call it once, as soon as everything given has left."""

    def drop_unsent(self) -> None:
        """The sender is gone. What its kernel has is still sent; a message beyond that is lost."""


class InstantFlow:
    """A flow of no length."""

    def __init__(self, time: VirtualTime) -> None:
        self.num_sent_bytes = self.num_arrived_bytes = self.num_lost_bytes = 0
        self._time = time

    is_free = True

    def send(self, num_bytes: int, arrived: Action) -> None:
        """It arrives now."""
        self.num_sent_bytes += num_bytes
        self.num_arrived_bytes += num_bytes
        self._time.at(self._time.now, arrived)

    def when_free(self, action: Action) -> None:
        """At once."""
        self._time.at(self._time.now, action)

    def drop_unsent(self) -> None:
        """Nothing waits."""


@dataclass(slots=True)
class _Message:
    left_bytes: int  # still to arrive
    arrived: Action | None  # None: the rest of it was lost


class ShapedFlow:
    """A flow of the link model.

    Args:
        chunk: bytes in which it takes turns with the other flows of its lane.
        heard: called whenever something has come through.
    """

    def __init__(
        self,
        time: VirtualTime,
        pump: Pump,
        lane: Lane,
        path: Path,
        chunk: int,
        heard: Action = lambda: None,
    ) -> None:
        self.num_sent_bytes = self.num_arrived_bytes = self.num_lost_bytes = 0
        self._time, self._pump, self._lane, self._heard = time, pump, lane, heard
        self._flow = Flow(path, BOUNDLESS, chunk, self._hand_over, self._emptied)
        self._messages: deque[_Message] = deque()
        self._waiting: list[Action] = []

    @property
    def is_free(self) -> bool:
        """Whether everything given is on the lane."""
        return not self._flow.waiting

    def send(self, num_bytes: int, arrived: Action) -> None:
        """Put them on their way (0: a close)."""
        self.num_sent_bytes += num_bytes
        self._messages.append(_Message(num_bytes, arrived))
        self._pump.push(self._lane, self._flow, bytes(num_bytes))  # what is in it travels beside it

    def when_free(self, action: Action) -> None:
        """Call it once, as soon as everything given is on the lane."""
        self._waiting.append(action)
        if self.is_free:
            self._emptied()

    def _emptied(self) -> None:
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self._time.at(self._time.now, action)

    def drop_unsent(self) -> None:
        """Drop the message that is being sent, if more of it waits than a kernel holds."""
        if self._flow.num_waiting_bytes <= SOCKET_BUFFER_BYTES:
            return
        dropped = self._flow.drop_waiting()
        self.num_lost_bytes += dropped
        while dropped:
            last = self._messages[-1]
            last.arrived = None
            taken = min(dropped, last.left_bytes)
            last.left_bytes -= taken
            dropped -= taken
            if last.left_bytes:
                return
            self._messages.pop()

    def _hand_over(self) -> bool:
        while (data := self._flow.pop_arrived(self._time.now)) is not None:
            self.num_arrived_bytes += len(data)
            message = self._messages[0]
            message.left_bytes -= len(data)
            if not message.left_bytes:
                self._messages.popleft()
                if message.arrived is not None:
                    message.arrived()
            self._heard()
        return True
