"""What the links of a run's learners do to its rounds: transfers, time between rounds, grace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from dd_lightning.network.link import (
    BITS_PER_BYTE,
    RTO_MIN_S,
    Direction,
    flow_rate_bit_s,
    rate_bit_s,
    transfer_s,
)
from dd_lightning.network.profiles import INITIAL_WINDOW_BYTES, Link, WanProfile
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.estimates import in_flight_bound

LEAST_FREE = 0.1  # of an uplink that a learner's reports leave to its contributions
HALF_STEP = 0.5  # what a message waits for the next boundary, on average
REPORT_BYTES = 450  # a learner's report after each step
HEADER_BYTES_UP, HEADER_BYTES_DOWN = 510, 320  # of one fragment, with its pull and answers
JOIN_ROUND_TRIPS = 17  # from dialing to joined, measured on a simulated link (docs/estimate.md)


@dataclass(frozen=True, slots=True)
class Path:
    """A learner's way to the syncer, for one fragment; seconds. `up_s`, `down_s`: while all
    learners of the region use its pipe, `alone_s`: while no other does."""

    region: str
    rtt_s: float
    alone_s: float
    up_s: float
    down_s: float

    @property
    def rho_s(self) -> float:
        """Pull sent to contribution arrived at best, without the wait for the boundary."""
        return self.rtt_s + self.alone_s

    @property
    def shared_rho_s(self) -> float:
        """The same while the region's learners send together."""
        return self.rtt_s + self.up_s


def paths(learners: int, network: WanProfile, up: float, down: float, step_s: float) -> list[Path]:
    """Of every learner; `up` and `down` are a fragment's bytes. Learners of one region share its
    pipe, and a region's own flow is no faster than TCP allows."""
    if not network.needs_proxy:
        return [Path("local", 0.0, 0.0, 0.0, 0.0)] * learners
    regions = [network.region_of(index) for index in range(learners)]
    sharing = Counter(regions)
    found = []
    for region in regions:
        link: Link = network.link(region)
        rtt_s = link.rtt_ms / 1e3
        reports_s = REPORT_BYTES / step_s * BITS_PER_BYTE / flow_rate_bit_s(link, "up")
        free = max(LEAST_FREE, 1 - reports_s)
        alone_s = transfer_s(link, int(up + HEADER_BYTES_UP), "up") / free
        up_s = max(alone_s, sharing[region] * _line_s(link, up + HEADER_BYTES_UP, "up") / free)
        down_s = max(
            transfer_s(link, int(down + HEADER_BYTES_DOWN), "down"),
            sharing[region] * _line_s(link, down + HEADER_BYTES_DOWN, "down"),
        )
        if link.tcp != "none" and step_s > rtt_s + RTO_MIN_S:  # a report a step keeps it warm
            alone_s += slow_start_s(link, up)
        found.append(Path(region, rtt_s, alone_s, up_s, down_s))
    return found


def _line_s(link: Link, size: float, way: Direction) -> float:
    return BITS_PER_BYTE * size / rate_bit_s(link, way)


def interval(ways: Sequence[Path], config: SyncerConfig, step_s: float) -> tuple[float, int]:
    """(seconds between two rounds, rounds in flight): the schedule, the links, or the latency."""
    algorithm = config.algorithm
    planned = step_s * algorithm.sync_every / algorithm.fragments
    uploads = sorted(way.up_s for way in ways)
    transfer = median(max(way.up_s, way.down_s) for way in ways)
    rho = median(way.rho_s for way in ways)
    grace = grace_s(ways, config, step_s)
    configured = algorithm.max_in_flight
    bound = (
        min(configured, algorithm.fragments)
        if isinstance(configured, int)
        else in_flight_bound(
            rho, step_s, grace, transfer, algorithm.sync_every, algorithm.fragments
        )
    )
    arrivals = sorted(way.shared_rho_s for way in ways)
    open_s = arrivals[config.quorum - 1] + HALF_STEP * step_s + grace
    return max(planned, uploads[config.quorum - 1], open_s / bound), bound


def grace_s(ways: Sequence[Path], config: SyncerConfig, step_s: float) -> float:
    """What a round waits for those whose lateness is within the cap."""
    algorithm = config.algorithm
    if algorithm.grace_rule == "none":
        return 0.0
    cap = algorithm.grace_cap
    cap_s = step_s * (max(2.0, algorithm.sync_every / 6) if cap is None else cap)
    arrivals = sorted(way.shared_rho_s for way in ways)
    late = [arrival - arrivals[config.quorum - 1] for arrival in arrivals]
    return max([0.0, *(value for value in late if value <= cap_s)])


def start_s(way: Path, fragments: int) -> float:
    """From a learner's first packet to its first step: it dials, joins and loads Θ."""
    return JOIN_ROUND_TRIPS * way.rtt_s + fragments * way.down_s


def slow_start_s(link: Link, num_bytes: float) -> float:
    """What a flow that was idle for longer than its retransmission timeout needs on top: the
    window doubles from its first size in each round trip, until it holds all or fills the path."""
    rtt_s = link.rtt_ms / 1e3
    path_bytes = rtt_s * flow_rate_bit_s(link, "up") / BITS_PER_BYTE
    window, waits = INITIAL_WINDOW_BYTES, 0
    sent = window
    while sent < num_bytes and window < path_bytes:
        window, waits = 2 * window, waits + 1
        sent += window
    return waits * rtt_s
