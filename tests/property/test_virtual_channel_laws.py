"""Laws of `wan.md` (d) on the virtual channel: whole messages over shared lanes in virtual time.

The same laws hold of single paths and of the proxy's lanes (`test_network_laws.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dd_lightning.network.link import BITS_PER_BYTE
from dd_lightning.network.profiles import Link, Outage, WanProfile
from dd_lightning.simulate.sessions import ROLES
from dd_lightning.transport.frames import DATA
from tests.virtual_links import Links

pytestmark = [pytest.mark.property]
some = settings(max_examples=40, deadline=None)

WAYS = ("up", "down")
LATE_S = 1e5  # by then everything has come, of what these links are given
waits = st.lists(st.floats(0, 1), min_size=1, max_size=8)
sizes = st.integers(1, 300_000)
PERFECT = Link(rtt_ms=0, up_mbit_s=1e12, down_mbit_s=1e12, tcp="none", slow_start=False)


@st.composite
def links(draw: st.DrawFn, disturbed: bool = True, **fixed: Any) -> Link:
    values = {
        "rtt_ms": draw(st.floats(0, 300)),
        "up_mbit_s": draw(st.floats(1, 1000)),
        "down_mbit_s": draw(st.floats(1, 1000)),
        "jitter_ms": draw(st.floats(0, 50)) if disturbed else 0.0,
        "loss": draw(st.sampled_from([0.0, 1e-3, 0.02])) if disturbed else 0.0,
        "tcp": draw(st.sampled_from(["reno", "cubic", "bbr", "none"])),
        "window_mib": draw(st.floats(0.1, 32)),
        "slow_start": draw(st.booleans()),
    }
    return Link(**{**values, **fixed})


def fabric(link: Link, other: Link | None = None, outages: tuple[Outage, ...] = ()) -> Links:
    """Learners 0 and 2 in region a, learner 1 in c."""
    matrix = {("a", "s"): link, ("c", "s"): other or link}
    wan = WanProfile("test", ("a", "c", "s"), matrix, "s", ("a", "c", "a"), outages=outages)
    return Links(wan)


class Played:
    """Messages of one session per learner, played to their end."""

    def __init__(self, world: Links, learners: int = 1) -> None:
        self.world = world
        self.sessions = [world.connect(learner) for learner in range(learners)]
        self.tape: list[tuple[int, Any, Any, int, float, float]] = []
        self.began = world.time.now

    def send(self, learner: int, way: Any, role: bytes, size: int, wait: float = 0.0) -> None:
        """After so long, put a message on its way."""
        time = self.world.time
        if wait:
            self.world.play(time.now + wait)
        sent = time.now

        def arrived() -> None:
            self.tape.append((learner, way, role, size, sent, time.now))

        self.sessions[learner].flows[way, role].send(size, arrived)

    def end(self) -> list[tuple[int, Any, Any, int, float, float]]:
        """All of (learner, way, role, size, sent, arrived), in order of arrival."""
        self.world.play(LATE_S)
        return self.tape

    def last(self, learner: int = 0) -> float:
        """Seconds until its last message had come."""
        return max(row[-1] for row in self.end() if row[0] == learner) - self.began


plans = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(WAYS),
        st.sampled_from(ROLES),
        sizes,
        st.floats(0, 1),
    ),
    min_size=1,
    max_size=10,
)


def played(world: Links, plan: list[tuple[int, Any, bytes, int, float]]) -> Played:
    run = Played(world, 3)
    for learner, way, role, size, wait in plan:
        run.send(learner, way, role, size, wait)
    return run


@some
@given(links(), plans, st.floats(0, 3))
def test_bytes_in_are_bytes_out_and_in_flight(link, plan, then) -> None:
    run = played(fabric(link), plan)
    run.world.play(run.world.time.now + then)
    flows = [flow for session in run.sessions for flow in session.flows.values()]
    came = sum(row[3] for row in run.tape)
    for flow in flows:
        in_flight = flow.num_sent_bytes - flow.num_arrived_bytes
        assert in_flight == sum(message.left_bytes for message in flow._messages) >= 0
    assert sum(flow.num_arrived_bytes for flow in flows) >= came
    assert len(run.end()) == len(plan)
    assert all(flow.num_sent_bytes == flow.num_arrived_bytes for flow in flows)


@some
@given(links(), plans)
def test_never_faster_than_propagation_and_serialization(link, plan) -> None:
    for _, way, _, size, sent, came in played(fabric(link), plan).end():
        rate = link.up_mbit_s if way == "up" else link.down_mbit_s
        least = link.rtt_ms / 2e3 + size * BITS_PER_BYTE / (rate * 1e6)
        assert came - sent >= least * (1 - 1e-9) - 1e-9


@some
@given(links(), plans, st.floats(0, 5), st.floats(0.1, 1.0))
def test_messages_of_a_flow_keep_their_order_and_none_comes_in_an_outage(
    link, plan, start, seconds
) -> None:
    # shorter than what ends a session
    outage = Outage(frozenset("a"), start, seconds, every_s=30.0)
    run = played(fabric(link, outages=(outage,)), plan)
    run.world.play(run.world.time.now + 200.0)
    for learner in range(3):
        for way in WAYS:
            for role in ROLES:
                mine = [row for row in run.tape if row[:3] == (learner, way, role)]
                assert [row[4] for row in mine] == sorted(row[4] for row in mine)
    for row in run.tape:
        assert row[0] == 1 or outage.first_overlap(row[-1], row[-1]) is None


@some
@given(links(disturbed=False, tcp="none"), st.integers(1, 3), sizes)
def test_k_flows_end_no_earlier_than_one_of_k_times_the_size(link, k, size) -> None:
    single = Played(fabric(link))
    single.send(0, "up", DATA, k * size)
    shared = Played(fabric(link), 3)
    roles = [(0, DATA), (2, DATA), (0, ROLES[0])]  # all of region a
    for learner, role in roles[:k]:
        shared.send(learner, "up", role, size)
    last = max(row[-1] for row in shared.end()) - shared.began
    assert last >= single.last() * (1 - 1e-9)


def took(link: Link, size: int) -> float:
    run = Played(fabric(link))
    run.send(0, "up", DATA, size)
    return run.last()


@some
@given(links(disturbed=False), sizes, st.floats(1, 5))
def test_longer_ways_more_bytes_and_slower_links_take_longer(link, size, factor) -> None:
    least = took(link, size) * (1 - 1e-6)
    assert took(link, int(size * factor)) >= least
    assert took(replace(link, rtt_ms=link.rtt_ms * factor), size) >= least
    assert took(replace(link, up_mbit_s=link.up_mbit_s / factor), size) >= least


@some
@given(plans)
def test_a_network_of_nothing_adds_nothing(plan) -> None:
    none = WanProfile("none", ("local",), {}, "local", ("local",))
    for world, late_s in ((Links(none), 0.0), (fabric(PERFECT), 1e-6)):
        for *_, sent, came in played(world, plan).end():
            assert sent <= came <= sent + late_s


@some
@given(links(), plans)
def test_same_seed_same_tape(link, plan) -> None:
    first, second = (played(fabric(link), plan).end() for _ in range(2))
    assert first == second


@some
@given(links(), links(), plans)
def test_two_links_are_independent(link, other, plan) -> None:
    alone = [row for row in plan if row[0] != 1]
    both = Played(fabric(link, other), 3)
    begin = both.began
    for learner, way, role, size, wait in plan:
        both.send(learner, way, role, size, wait if learner != 1 else 0.0)
    apart = Played(fabric(link, other), 3)
    for learner, way, role, size, wait in alone:
        apart.send(learner, way, role, size, wait)
    assert apart.began == begin
    assert [row for row in both.end() if row[0] != 1] == apart.end()
