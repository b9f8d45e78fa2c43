"""The simulated link against the kernel's own TCP over the link of `tunwan.py`.

Within the tolerances of `wan.md`: 5 % + 10 ms warm, 15 % cold or limited by the window, factor 2
under loss, [outage, 2.1 x outage + 1 s]. Noise: a busy machine makes messages longer, never
shorter. So medians of several are compared, and a measurement during which the forwarder itself
was late (one packet in ten by more than `STEADY_S`) is made again, at most `ATTEMPTS` times in all;
of each size the shortest median counts. What is left of the noise is allowed for: twice that
lateness, as a message and its answer both pass the forwarder.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import pytest

from dd_lightning.network.probe import AckServer, request_times
from dd_lightning.network.profiles import WanProfile
from tests.netns.namespaces import ADDRESSES, Link, Shape, inside, joined_namespaces, unavailable
from tests.simulated_requests import simulated_times

pytestmark = [
    pytest.mark.integration,
    pytest.mark.netns,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]

RTT_S, MBIT_S = 0.08, 100
WARM_UP_BYTES = 20_000_000
IDLE_S = 2.5  # TCP halves its window each RTO of it, down to ten packets
ATTEMPTS, STEADY_S = 4, 0.005
RECEIVE_WINDOW = 232  # offset in Linux' struct tcp_info: the window that is offered, bytes
Times = dict[int, list[float]]


def profile(outages: tuple[dict[str, Any], ...] = (), **link: Any) -> WanProfile:
    values = {"rtt_ms": 1e3 * RTT_S, "mbit_s": MBIT_S, **link}
    return WanProfile.from_config(
        {"name": "test", "regions": ["a", "b"], "syncer_region": "b", "learner_regions": ["a"]}
        | {"links": {"a-b": values}, "outages": outages}
    )


class Wire:
    """A server at the far end, and requests from the near one."""

    def __init__(self, link: Link, receive_bytes: int | None = None) -> None:
        self.link = link
        with inside(link.names[1]):
            self.server = AckServer(ADDRESSES[1], receive_bytes)

    def times(self, *arguments: Any, **options: Any) -> Times:
        """As `request_times`, over a connection of its own."""
        with inside(self.link.names[0]):
            return request_times((ADDRESSES[1], self.server.port), *arguments, **options)

    def side_by_side(self, *runs: tuple[float, Callable[[], Times]]) -> list[Times]:
        """What several connections at once say; each begins after so many seconds."""

        def later(delay_s: float, run: Callable[[], Times]) -> Times:
            time.sleep(delay_s)
            return run()

        with ThreadPoolExecutor(len(runs)) as pool:
            return list(pool.map(lambda run: later(*run), runs))


@pytest.fixture(scope="module")
def link():
    shape = Shape(rate_bit_s=1e6 * MBIT_S, delay_s=RTT_S / 2)
    with joined_namespaces(shape) as made:
        yield made


@pytest.fixture
def wire(link):
    made = Wire(link)
    with made.server:
        yield made


def medians(times: list[Times]) -> dict[int, float]:
    """Of all connections, by size."""
    return {size: median([t for one in times for t in one[size]]) for size in times[0]}


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians by size, s, and by how much the forwarder was late meanwhile, s."""

    medians: dict[int, float]
    late_s: float

    def assert_are(self, simulated: Times, rel: float, add: float = 0.0) -> None:
        """Each within `rel` * expected + `add` of what is simulated, and the noise."""
        for size, values in simulated.items():
            expected = median(values)
            most = rel * expected + add + 2 * self.late_s
            assert abs(self.medians[size] - expected) <= most, (size, self, simulated)


def steadily(link: Link, measure: Callable[[], list[Times]]) -> Measured:
    """Measured until the forwarder was not late."""
    found: list[dict[int, float]] = []
    late_s = float("inf")
    for _ in range(ATTEMPTS):
        link.lateness()
        found.append(medians(measure()))
        late_s = min(late_s, link.lateness())
        if late_s <= STEADY_S:
            break
    print(f"measured {found}, at best one packet in ten late by {1e3 * late_s:.1f} ms")
    return Measured({size: min(one[size] for one in found) for size in found[0]}, late_s)


def test_warm_requests(wire) -> None:
    sizes = [10_000, 100_000, 1_000_000, 8_000_000]
    measured = steadily(
        wire.link, lambda: [wire.times(sizes, 3, WARM_UP_BYTES, congestion="cubic")]
    )
    simulated = simulated_times(profile(), sizes, 1, WARM_UP_BYTES)
    measured.assert_are(simulated, rel=0.05, add=0.01)


def test_requests_after_an_idle_time_start_slowly_again(wire) -> None:
    sizes, apart_s = [100_000, 1_000_000], 0.9  # so that no two are under way at a time

    def measure() -> list[Times]:
        def run() -> Times:
            return wire.times(sizes, 1, 1_000_000, idle_s=IDLE_S, congestion="cubic")

        return wire.side_by_side(*((index * apart_s, run) for index in range(3)))

    simulated = simulated_times(profile(), sizes, 1, 1_000_000, idle_s=IDLE_S)
    assert simulated[1_000_000][0] > 4 * RTT_S
    steadily(wire.link, measure).assert_are(simulated, rel=0.15)


def test_first_requests_of_a_connection_start_slowly(wire) -> None:
    sizes = [10_000, 300_000, 8_000_000]

    def measure() -> list[Times]:
        return [
            {size: wire.times([size], 1, congestion="cubic")[size] for size in sizes}
            for _ in range(3)
        ]

    simulated = {size: simulated_times(profile(), [size], 1)[size] for size in sizes}
    steadily(wire.link, measure).assert_are(simulated, rel=0.15, add=0.01)


@pytest.mark.parametrize("receive_bytes", [65_536, 262_144])
def test_a_window_limits_what_a_flow_gets(link, receive_bytes: int) -> None:
    size, warm_up = 12 * receive_bytes, 4 * receive_bytes
    wire = Wire(link, receive_bytes)
    with wire.server:
        measured = steadily(link, lambda: [wire.times([size], 1, warm_up, congestion="cubic")])
        info = wire.server.connections[0].getsockopt(
            socket.IPPROTO_TCP, socket.TCP_INFO, RECEIVE_WINDOW + 4
        )
    (window,) = struct.unpack_from("=I", info, RECEIVE_WINDOW)  # the kernel makes it of the buffer
    assert window / RTT_S < 0.5 * 1e6 * MBIT_S / 8
    simulated = simulated_times(profile(window_mib=window / 2**20), [size], 1, warm_up)
    measured.assert_are(simulated, rel=0.15)


def test_loss_slows_what_backs_off() -> None:
    """In the mean: single messages differ tenfold, by which of their packets are lost."""
    loss, kinds, sizes, warm_up = 0.01, ("cubic", "reno"), {100_000: 15, 1_000_000: 1}, 500_000
    shape = Shape(rate_bit_s=1e6 * MBIT_S, delay_s=RTT_S / 2, loss=loss)
    found: dict[str, list[Times]] = {kind: [] for kind in kinds}
    with joined_namespaces(shape) as link, (wire := Wire(link)).server:

        def run(kind: str, size: int) -> Times:
            times = wire.times([size], sizes[size], warm_up, congestion=kind)
            found[kind].append(times)
            return times

        each = [(kind, size) for kind in kinds for size in sizes] * 3
        wire.side_by_side(*((0.0, lambda one=one: run(*one)) for one in each))
    for kind, times in found.items():
        for size, repeats in sizes.items():
            measured = fmean(t for one in times for t in one.get(size, ()))
            wan = profile(loss=loss, tcp=kind)
            runs = [simulated_times(wan, [size], repeats, warm_up, seed=seed) for seed in range(5)]
            ratio = measured / fmean(t for one in runs for t in one[size])
            print(f"{kind} {size}: measured {measured:.2f} s, {ratio:.2f} x simulated")
            assert 0.5 <= ratio <= 2.0, (kind, size, measured, runs)


def test_an_outage_costs_up_to_twice_its_length(wire) -> None:
    outage_s, message, messages, after_s = 2.0, 100_000, 30, 1.0

    def stream() -> Times:
        return wire.times([message], messages, congestion="cubic")

    def cut() -> Times:
        wire.link.cut(outage_s)
        return {}

    found = wire.side_by_side(*((0.0, stream) for _ in range(3)), (after_s, cut))
    hits = [max(times[message]) for times in found if times]
    outage = {"region": "a", "start_s": after_s, "seconds": outage_s}
    simulated = max(simulated_times(profile((outage,)), [message], messages)[message])
    print(f"outage {outage_s} s: measured {hits}, simulated {simulated}")
    for seconds in (*hits, simulated):  # the message may have begun when its first packet was lost
        assert outage_s - RTT_S / 2 <= seconds <= 2.1 * outage_s + 1.0


def test_nothing_is_left_behind() -> None:
    with joined_namespaces(Shape()) as link:
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        assert all(name in listed.stdout for name in link.names)
        threads = threading.active_count()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    assert not any(name in listed.stdout for name in link.names)
    assert threading.active_count() == threads
