"""Bytes on their way: bounded flows that take turns on a shared lane, then wait for their arrival.

No clock and no socket: `now` is passed in, so property tests drive it in virtual time. Memory of a
flow is bounded by its capacity; who offers more than `room()` has not read it.
"""

from collections import deque
from collections.abc import Callable
from itertools import count

from dd_lightning.network.link import (
    BITS_PER_BYTE,
    Direction,
    Path,
    Serializer,
    flow_rate_bit_s,
    rate_bit_s,
)
from dd_lightning.network.profiles import MIB, Link

MAX_CHUNK_BYTES = 64 * 1024
MIN_CHUNK_BYTES = 4 * 1024
CHUNK_S = 0.01  # a chunk takes about this long on the pipe: the unit in which flows take turns
HORIZON_S = 0.002  # the pipe is filled this far ahead, so that timers of 1 ms do not leave gaps
SLACK_S = 0.02  # what a flow may hold beyond the pipe's content, to ride out a late event loop


def chunk_bytes(link: Link, direction: Direction) -> int:
    """Size in which a flow's bytes take turns with other flows' on this link."""
    size = int(rate_bit_s(link, direction) / BITS_PER_BYTE * CHUNK_S)
    return max(MIN_CHUNK_BYTES, min(size, MAX_CHUNK_BYTES))


def capacity_bytes(link: Link, direction: Direction) -> int:
    """Bytes a flow may hold: what is on one way of the pipe, never above half the TCP window.

    Half, because they are let go on arrival and not when an acknowledgement is back. Two chunks
    more are there to be sent next.
    """
    rtt_s, jitter_s = link.rtt_ms / 1e3, link.jitter_ms / 1e3
    held_s = rtt_s / 2 + 4 * jitter_s + SLACK_S + (2 * rtt_s if link.loss else 0.0)
    pipe = flow_rate_bit_s(link, direction) / BITS_PER_BYTE * held_s
    return int(min(pipe, link.window_mib * MIB / 2)) + 2 * chunk_bytes(link, direction)


class Flow:
    """One direction of one connection. An empty chunk is its close.

    Args:
        hand_over: called when a chunk may have arrived; false: the receiver takes no more for now.
        emptied: called when nothing waits any more.
    """

    __slots__ = (
        "_arriving",
        "_held",
        "_waiting",
        "capacity",
        "chunk",
        "emptied",
        "hand_over",
        "number",
        "path",
        "timed",
    )
    _numbers = count()

    def __init__(
        self,
        path: Path,
        capacity: int,
        chunk: int = MAX_CHUNK_BYTES,
        hand_over: Callable[[], bool] = lambda: True,
        emptied: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.hand_over = hand_over
        self.emptied = emptied
        self.timed = False  # whether the pump has its next arrival on the clock
        self.capacity = capacity
        self.chunk = chunk
        self.number = next(self._numbers)  # breaks ties between arrivals
        self._waiting: deque[tuple[float, memoryview]] = deque()  # since when, bytes
        self._arriving: deque[tuple[float, memoryview]] = deque()  # when, bytes
        self._held = 0

    def room(self) -> int:
        """Bytes that may be pushed now."""
        return self.capacity - self._held

    @property
    def waiting(self) -> bool:
        """Whether something has not been put on the lane yet."""
        return bool(self._waiting)

    @property
    def next_arrival(self) -> float | None:
        """When the first chunk on its way arrives."""
        return self._arriving[0][0] if self._arriving else None

    def push(self, now: float, data: bytes) -> None:
        """Take bytes in (at most `room()`), or a close (empty)."""
        assert len(data) <= self.room(), (len(data), self.room())
        self._held += len(data)
        self._waiting.append((now, memoryview(data)))

    def put_on_lane(self) -> None:
        """Send one chunk of what waits."""
        since, data = self._waiting.popleft()
        if len(data) > self.chunk:
            self._waiting.appendleft((since, data[self.chunk :]))
            data = data[: self.chunk]
        self._arriving.append((self.path.send(since, len(data)), data))

    def pop_arrived(self, now: float) -> memoryview | None:
        """The next chunk that has arrived by `now`, in the order pushed; empty: the close."""
        if not self._arriving or self._arriving[0][0] > now:
            return None
        data = self._arriving.popleft()[1]
        self._held -= len(data)
        return data

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes that have not been put on the lane yet."""
        return sum(len(data) for _, data in self._waiting)

    def drop_waiting(self) -> int:
        """Forget what has not been put on the lane yet; returns how many bytes that was."""
        dropped = self.num_waiting_bytes
        self._waiting.clear()
        self._held -= dropped
        return dropped


class Lane:
    """The flows of a region in one direction; they take turns on the shared serializer."""

    __slots__ = ("_serializer", "_turns")

    def __init__(self, serializer: Serializer) -> None:
        self._serializer = serializer
        self._turns: deque[Flow] = deque()

    def enlist(self, flow: Flow) -> None:
        """Let a flow with something to send take turns."""
        if flow not in self._turns:
            self._turns.append(flow)

    def pump(self, now: float) -> list[Flow]:
        """Fill the pipe up to `HORIZON_S` ahead; returns the flows that have chunks arriving.

        A flow that its own window, loss or outage holds back is passed over, so that it does not
        take capacity now which it can only use later.
        """
        moved: dict[Flow, None] = {}
        passed = 0
        while self._turns and passed < len(self._turns):
            if self._serializer.free_at > now + HORIZON_S:
                break
            flow = self._turns.popleft()
            if not flow.waiting:  # dropped meanwhile
                continue
            if flow.path.ready_at > now + HORIZON_S:
                self._turns.append(flow)
                passed += 1
                continue
            passed = 0
            flow.put_on_lane()
            moved[flow] = None
            if flow.waiting:
                self._turns.append(flow)
        return list(moved)

    def next_pump(self) -> float | None:
        """When pumping can go on; None with nothing to send."""
        if not self._turns:
            return None
        ready = min(flow.path.ready_at for flow in self._turns)
        return max(ready, self._serializer.free_at) - HORIZON_S / 2
