"""What a link does to bytes: when does a chunk, handed over at `now`, arrive.

Pure and without a clock: the shaping proxy feeds wall time, a simulator virtual time. Not a packet
simulator: one TCP flow is a sliding window over a shared serializer, then a delay.
"""

from collections import deque
from collections.abc import Iterable
from math import log, log1p, sqrt
from random import Random
from typing import Literal, Protocol

from dd_lightning.network.profiles import (
    INITIAL_WINDOW_BYTES,
    MIB,
    SEGMENT_BYTES,
    Link,
    Outage,
    WanProfile,
)

Direction = Literal["up", "down"]
BITS_PER_BYTE = 8 * 1500 / SEGMENT_BYTES  # on the wire, per byte of payload: headers included
RTO_MIN_S = 0.2  # Linux: retransmission timeout = RTT + at least this
MAX_CUTS = 1000  # outages that one chunk may run into before the profile is called unusable
IN_STEP_CUTS = 8
OUTAGE_RTO_S = 0.3  # first timeout seen in an outage; each further one waits twice as long
SYN_RTO_S = 1.0  # the same of a connection that is being made: tried again after 1, 3, 7, … s
MATHIS_C = sqrt(3 / 2)  # Mathis et al. 1997
LOSS_BASED = ("reno", "cubic")


def rate_bit_s(link: Link, direction: Direction) -> float:
    """Line rate of one direction, bit/s."""
    return 1e6 * (link.up_mbit_s if direction == "up" else link.down_mbit_s)


def flow_rate_bit_s(link: Link, direction: Direction) -> float:
    """Most that one warm connection gets, bit/s: line rate, loss and window limit.

    Loss limit of loss-based control: MSS / RTT * sqrt(3/2) / sqrt(loss) (Mathis et al. 1997, good
    below 2 % loss); it follows `bandwidth_scale`, as the line rate does.
    """
    rate = _paced_rate_bit_s(link, direction)
    rtt_s = link.rtt_ms / 1e3
    if link.tcp == "none" or not rtt_s:
        return rate
    return min(rate, BITS_PER_BYTE * link.window_mib * MIB / rtt_s)


def _paced_rate_bit_s(link: Link, direction: Direction) -> float:
    rate = rate_bit_s(link, direction)
    rtt_s = link.rtt_ms / 1e3
    if link.tcp in LOSS_BASED and link.loss and rtt_s:
        cap = BITS_PER_BYTE * SEGMENT_BYTES / rtt_s * MATHIS_C / sqrt(link.loss)
        rate = min(rate, cap * link.scale)
    return rate


def transfer_s(link: Link, num_bytes: int, direction: Direction = "up") -> float:
    """Time on the wire of `num_bytes` on a warm, undisturbed connection, without the round trip.

    Divided by the time between two syncs of a fragment this is rho, by which a scaled run is
    compared with the big one that it stands for.
    """
    return num_bytes * BITS_PER_BYTE / flow_rate_bit_s(link, direction)


class Serializer:
    """A pipe that sends chunk after chunk; shared by the flows of a region and direction."""

    __slots__ = ("bit_s", "free_at")

    def __init__(self, bit_s: float) -> None:
        self.bit_s = bit_s
        self.free_at = 0.0

    def reserve(self, now: float, num_bytes: int) -> float:
        """Queue `num_bytes` that are there since `now`; returns when their last bit has left."""
        self.free_at = max(now, self.free_at) + num_bytes * BITS_PER_BYTE / self.bit_s
        return self.free_at


class _Window:
    """Sliding TCP window of one flow with slow start; answers when bytes may leave.

    The window opens with the acknowledgements, one round trip after the bytes left. It starts at
    ten packets, doubles each round trip in which it was used, and stops mattering once it holds
    what the pipe holds.
    """

    __slots__ = (
        "_acks",
        "_byte_s",
        "_full",
        "_idle_s",
        "_in_flight",
        "_limited",
        "_peak",
        "_ramps",
        "_rtt_s",
        "_size",
        "free_at",
    )

    def __init__(self, link: Link, bit_s: float) -> None:
        self._rtt_s = link.rtt_ms / 1e3
        self._byte_s = BITS_PER_BYTE / bit_s
        limit = link.window_mib * MIB if link.tcp != "none" else float("inf")
        # 1.1: the granularity of `_piece` must not make a window bind that holds the whole pipe
        pipe = 1.1 * bit_s / BITS_PER_BYTE * self._rtt_s
        self._limited = limit < pipe
        self._full = min(limit, pipe)
        self._ramps = link.slow_start and link.tcp != "none"
        self._size = min(INITIAL_WINDOW_BYTES, self._full) if self._ramps else self._full
        # bbr keeps its estimate over an idle time (measured: no second ramp)
        forgets = self._ramps and link.tcp in LOSS_BASED
        self._idle_s = self._rtt_s + RTO_MIN_S if forgets else float("inf")
        self._acks: deque[tuple[float, int]] = deque()
        self._in_flight = self._peak = 0
        self.free_at = 0.0

    @property
    def _binds(self) -> bool:
        """Whether the window may hold the flow back: it still grows, or never holds the pipe."""
        return self._size < self._full or self._limited

    def resume(self, at: float) -> None:
        """Go on at `at` after a timeout: nothing in flight, ten packets if it ramps."""
        self._acks.clear()
        self._in_flight = self._peak = 0
        if self._ramps:
            self._size = min(INITIAL_WINDOW_BYTES, self._full)
        self.free_at = at

    def send(self, now: float, num_bytes: int) -> float:
        """When the last of `num_bytes`, there since `now`, has left under the window."""
        leave = max(now, self.free_at)
        if now - self.free_at > self._idle_s:
            self.resume(now)
        left = num_bytes
        while left:
            if not self._binds:
                leave += left * self._byte_s
                break
            piece = min(left, max(2 * SEGMENT_BYTES, int(self._size / 16)))
            leave = self._opens(leave, piece) + piece * self._byte_s
            self._acks.append((leave + self._rtt_s, piece))
            self._in_flight += piece
            self._peak = max(self._peak, self._in_flight)
            left -= piece
        self.free_at = leave
        return leave

    def _opens(self, now: float, piece: int) -> float:
        """Earliest time at which `piece` fits; a piece above the window goes when it is empty."""
        while self._acks and (self._acks[0][0] <= now or self._in_flight + piece > self._size):
            acked_at, num_bytes = self._acks.popleft()
            now = max(now, acked_at)
            if 2 * self._peak >= self._size:  # not by a flow that has little to say
                self._size = min(self._size + num_bytes, self._full)
            self._in_flight -= num_bytes
            if not self._in_flight:
                self._peak = 0
        return now


class Disturbance(Protocol):
    """What befalls one learner's paths beyond the profile (`control.PathFaults`)."""

    cuts: list[Outage]

    def free_at(self, direction: Direction) -> float:
        """When it lets a flow take more; it may be past."""

    def reserve(self, direction: Direction, since: float, num_bytes: int) -> float:
        """When the last of `num_bytes` has left under it; it may be past."""


class Path:
    """One flow in one direction: `send` gives the arrival time of each chunk, in order.

    Args:
        serializer: shared with the other flows of the region in this direction.
        rng: jitter and loss; one stream per (source, destination).
        start: the time at which the outages' clocks begin.
        faults: of this learner's paths.
    """

    __slots__ = (
        "_direction",
        "_faults",
        "_last",
        "_link",
        "_one_way_s",
        "_outages",
        "_rate",
        "_rng",
        "_serializer",
        "_start",
        "_window",
    )

    def __init__(
        self,
        link: Link,
        direction: Direction,
        serializer: Serializer,
        rng: Random,
        outages: Iterable[Outage] = (),
        start: float = 0.0,
        faults: Disturbance | None = None,
    ) -> None:
        self._link = link
        self._direction = direction
        self._faults = faults
        self._serializer = serializer
        self._rng = rng
        self._outages = tuple(outages)
        self._start = start
        self._rate = _paced_rate_bit_s(link, direction)
        self._window = _Window(link, self._rate)
        self._one_way_s = link.rtt_ms / 2e3
        self._last = float("-inf")

    @property
    def ready_at(self) -> float:
        """When the flow's own limits let it take more; the pipe may be busy longer."""
        free_at = self._window.free_at
        return max(free_at, self._faults.free_at(self._direction)) if self._faults else free_at

    def send(self, now: float, num_bytes: int) -> float:
        """Arrival time of the last of `num_bytes` that are there since `now`.

        To be called in the order of time: a chunk of tomorrow would keep the shared pipe until
        then. The arrival is never before that of an earlier chunk of the flow, nor inside an
        outage. 0 bytes: a close.
        """
        return self._send(now, num_bytes, OUTAGE_RTO_S)

    def dial(self, now: float) -> float:
        """Arrival of the first packet of a new connection (its SYN, or the answer to one). In an
        outage it is sent again more slowly than data: who dials again itself is there sooner."""
        return self._send(now, 0, SYN_RTO_S)

    def _send(self, now: float, num_bytes: int, timeout_s: float) -> float:
        begin = max(now, self._window.free_at)
        left = self._window.send(now, num_bytes)
        left = max(left, self._serializer.reserve(now, num_bytes))
        if self._faults is not None:
            left = max(left, self._faults.reserve(self._direction, now, num_bytes))
        arrival = left + self._one_way_s + self._jitter_s() + self._recovery_s(num_bytes)
        arrival = self._after_outages(begin, left, max(arrival, self._last), timeout_s)
        self._last = arrival
        return arrival

    def _jitter_s(self) -> float:
        jitter_ms = self._link.jitter_ms
        return abs(self._rng.gauss(0.0, jitter_ms)) / 1e3 if jitter_ms else 0.0

    def _recovery_s(self, num_bytes: int) -> float:
        """How long lost packets hold up the rest of the flow, which TCP hands over in order.

        The losses of one flight are recovered together, in one round trip (SACK): counted one by
        one, 1 % loss would leave bbr a tenth of what was measured. A retransmission that is lost
        again costs a timeout. Of a long message only the last round trip can delay the end.
        """
        link = self._link
        if not link.loss or not num_bytes:
            return 0.0
        rtt_s = link.rtt_ms / 1e3
        flight = max(SEGMENT_BYTES, self._rate / BITS_PER_BYTE * rtt_s)
        packets = -(-int(min(num_bytes, flight)) // SEGMENT_BYTES)
        lost = _binomial(self._rng, packets, link.loss)
        delay = rtt_s if lost else 0.0
        timeout = rtt_s + RTO_MIN_S
        while lost := _binomial(self._rng, lost, link.loss):
            delay += timeout
            timeout *= 2
        return delay

    def _after_outages(
        self, begin: float, left: float, arrival: float, first_timeout_s: float
    ) -> float:
        """Move an arrival behind every outage that it meets.

        TCP finds the path working again only when its next timeout ends: first_timeout_s *
        (2^k - 1) after the first loss, up to twice the outage later. It then starts from a small
        window.
        """
        for attempt in range(MAX_CUTS):
            cut = self._first_cut(begin, arrival)
            if cut is None:
                return max(arrival, self._last)
            lost_at = max(begin, cut[0])
            timeout = first_timeout_s
            resume = lost_at + timeout
            while resume < cut[1]:
                timeout *= 2
                resume += timeout
            if attempt >= IN_STEP_CUTS:  # timeouts that keep step with the outages: end the dance
                resume = max(lost_at, cut[1]) + 1e-6
            rest = max(0.0, left - lost_at)
            begin, left = resume, resume + rest
            arrival = left + self._one_way_s
            self._window.resume(left)
        raise RuntimeError(
            f"after {MAX_CUTS} outages still no gap for a round trip of {self._link.rtt_ms} ms; "
            "make network.outages shorter or rarer"
        )

    def _first_cut(self, begin: float, end: float) -> tuple[float, float] | None:
        outages = (*self._outages, *(self._faults.cuts if self._faults is not None else ()))
        cuts = [o.first_overlap(begin - self._start, end - self._start) for o in outages]
        found = min((cut for cut in cuts if cut), default=None)
        return found and (found[0] + self._start, found[1] + self._start)


class LinkModel:
    """All paths of a profile: one serializer per learner region and direction, seeded streams.

    Args:
        start: time at which the outages' clocks begin, on the clock that `Path.send` is given.
    """

    def __init__(self, profile: WanProfile, seed: int = 0, start: float = 0.0) -> None:
        self._profile = profile
        self._seed = seed
        self.start = start
        self._serializers: dict[tuple[str, Direction], Serializer] = {}
        self._streams: dict[tuple[str, Direction], Random] = {}

    def serializer(self, region: str, direction: Direction) -> Serializer:
        """The pipe that all learners of `region` share in this direction."""
        key = (region, direction)
        if key not in self._serializers:
            self._serializers[key] = Serializer(rate_bit_s(self._profile.link(region), direction))
        return self._serializers[key]

    def path(self, region: str, direction: Direction, faults: Disturbance | None = None) -> Path:
        """A new flow (one connection, one direction) between a learner's region and the syncer."""
        key = (region, direction)
        if key not in self._streams:
            ends = (region, self._profile.syncer_region)
            source, destination = ends if direction == "up" else ends[::-1]
            # seeded by name: another region in the profile does not change this stream
            self._streams[key] = Random(f"{self._seed}:{source}>{destination}:{direction}")
        return Path(
            self._profile.link(region),
            direction,
            self.serializer(region, direction),
            self._streams[key],
            self._profile.outages_of(region),
            self.start,
            faults,
        )


def _binomial(rng: Random, trials: int, probability: float) -> int:
    """Successes among `trials`, by the geometric gaps between them: cost ~ the result."""
    if not trials or not probability:
        return 0
    count, position = 0, 0
    while True:
        position += int(log(1.0 - rng.random()) / log1p(-probability)) + 1
        if position > trials:
            return count
        count += 1
