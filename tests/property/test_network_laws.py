"""Laws that every link obeys, whatever its figures."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dd_lightning.network import Link, LinkModel, Outage, Path, WanProfile
from dd_lightning.network.lane import Flow, Lane
from dd_lightning.network.link import BITS_PER_BYTE

pytestmark = pytest.mark.property

sizes = st.lists(st.integers(0, 3_000_000), min_size=1, max_size=12)
gaps = st.lists(st.floats(0, 2), min_size=12, max_size=12)


@st.composite
def links(draw: st.DrawFn, disturbed: bool = True, **fixed: Any) -> Link:
    values = {
        "rtt_ms": draw(st.floats(0, 400)),
        "up_mbit_s": draw(st.floats(0.5, 5000)),
        "down_mbit_s": draw(st.floats(0.5, 5000)),
        "jitter_ms": draw(st.floats(0, 50)) if disturbed else 0.0,
        "loss": draw(st.sampled_from([0.0, 1e-3, 0.05])) if disturbed else 0.0,
        "tcp": draw(st.sampled_from(["reno", "cubic", "bbr", "none"])),
        "window_mib": draw(st.floats(0.05, 32)),
        "slow_start": draw(st.booleans()),
    }
    return Link(**{**values, **fixed})


def model(link: Link, other: Link | None = None, outages: tuple[Outage, ...] = (), seed: int = 0):
    matrix = {("a", "s"): link, ("b", "s"): other or link}
    wan = WanProfile("test", ("a", "b", "s"), matrix, "s", ("a", "b"), outages=outages)
    return LinkModel(wan, seed)


def arrivals(path: Path, chunks: list[int], waits: list[float]) -> list[tuple[float, float]]:
    """(handed over, arrived) of each chunk."""
    now, tape = 0.0, []
    for size, wait in zip(chunks, waits, strict=False):
        now += wait
        tape.append((now, path.send(now, size)))
    return tape


@given(links(), sizes, gaps)
def test_never_faster_than_propagation_and_serialization(link, chunks, waits) -> None:
    tape = arrivals(model(link).path("a", "up"), chunks, waits)
    for (begin, end), size in zip(tape, chunks, strict=True):
        least = link.rtt_ms / 2e3 + size * BITS_PER_BYTE / (link.up_mbit_s * 1e6)
        assert end - begin >= least * (1 - 1e-9) - 1e-9


@given(links(), sizes, gaps, st.floats(0, 5), st.floats(0.1, 5))
def test_order_is_kept_and_outages_deliver_nothing(link, chunks, waits, start, seconds) -> None:
    outage = Outage(frozenset("a"), start, seconds, every_s=seconds + link.rtt_ms / 1e3 + 1)
    tape = arrivals(model(link, outages=(outage,)).path("a", "up"), chunks, waits)
    ends = [end for _, end in tape]
    assert ends == sorted(ends)
    assert all(outage.first_overlap(end, end) is None for end in ends)


@given(links(), sizes, gaps, st.integers(0, 5))
def test_same_seed_same_tape(link, chunks, waits, seed) -> None:
    first, second = (
        arrivals(model(link, seed=seed).path("a", "down"), chunks, waits) for _ in range(2)
    )
    assert first == second


@given(links(), links(), sizes, gaps)
def test_regions_are_independent(link, other, chunks, waits) -> None:
    alone = arrivals(model(link).path("a", "up"), chunks, waits)
    both = model(link, other)
    both.path("b", "up").send(0.0, 10**7)
    both.path("a", "down").send(0.0, 10**7)
    assert arrivals(both.path("a", "up"), chunks, waits) == alone


@given(links(disturbed=False, tcp="none"), st.integers(1, 6), st.integers(1, 2_000_000))
def test_k_flows_are_no_faster_than_one_of_k_times_the_size(link, k, size) -> None:
    """Of an ideal TCP: with windows, k connections are faster, which is why people use them."""
    single = model(link).path("a", "up").send(0.0, k * size)
    shared = model(link)
    last = max(shared.path("a", "up").send(0.0, size) for _ in range(k))
    assert last >= single * (1 - 1e-9)


@given(links(disturbed=False), sizes, gaps, st.floats(1, 5))
def test_more_bytes_take_longer(link, chunks, waits, factor) -> None:
    few = arrivals(model(link).path("a", "up"), chunks[:1], waits)[0][1]
    many = arrivals(model(link).path("a", "up"), [int(chunks[0] * factor)], waits)[0][1]
    assert many >= few * (1 - 1e-9)


@given(links(disturbed=False), st.integers(0, 10**7), st.floats(1, 5))
def test_a_longer_round_trip_takes_longer(link, size, factor) -> None:
    near = model(link).path("a", "up").send(0.0, size)
    far_link = replace(link, rtt_ms=link.rtt_ms * factor)
    assert model(far_link).path("a", "up").send(0.0, size) >= near * (1 - 1e-9)


@given(links(disturbed=False), st.integers(0, 10**7), st.floats(1, 5))
def test_a_slower_rate_takes_longer(link, size, factor) -> None:
    fast = model(link).path("a", "up").send(0.0, size)
    slow_link = replace(link, up_mbit_s=link.up_mbit_s / factor)
    assert model(slow_link).path("a", "up").send(0.0, size) >= fast * (1 - 1e-9)


@given(sizes, gaps, st.sampled_from(["cubic", "bbr", "none"]))
def test_a_perfect_link_adds_nothing(chunks, waits, tcp) -> None:
    perfect = Link(rtt_ms=0, up_mbit_s=1e12, down_mbit_s=1e12, tcp=tcp)
    for begin, end in arrivals(model(perfect).path("a", "up"), chunks, waits):
        assert end == pytest.approx(begin, abs=1e-6)


@settings(max_examples=50)
@given(
    links(),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200_000)), min_size=1, max_size=20),
    st.integers(1, 65_536),
)
def test_bytes_in_are_bytes_out_and_in_order(link, pushes, chunk) -> None:
    """Three flows on one lane, driven in virtual time until nothing is on its way."""
    assume(sum(size for _, size in pushes) / chunk < 5000)
    shared = model(link)
    lane = Lane(shared.serializer("a", "up"))
    flows = [Flow(shared.path("a", "up"), 10**9, chunk) for _ in range(3)]
    sent, got = [bytearray() for _ in flows], [bytearray() for _ in flows]
    for number, (index, size) in enumerate(pushes):
        data = bytes([number]) * size
        sent[index] += data
        flows[index].push(0.0, data)
        lane.enlist(flows[index])
    now = 0.0
    while True:
        lane.pump(now)
        for flow, received in zip(flows, got, strict=True):
            while (data := flow.pop_arrived(now)) is not None:
                received += data
        for flow, out, received in zip(flows, sent, got, strict=True):
            assert flow.capacity - flow.room() == len(out) - len(received)
            assert out.startswith(received)
        times = [t for flow in flows if (t := flow.next_arrival) is not None]
        if (pump_at := lane.next_pump()) is not None:
            times.append(pump_at)
        if not times:
            break
        now = max(now, min(times))
    assert got == sent
