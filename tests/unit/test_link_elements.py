"""The nine elements of an honest link (`wan.md` d), each in effect on the network of mode=simulate.

| element                                     | in the model                         |
|---------------------------------------------|--------------------------------------|
| 1 propagation, once per message             | link.Path._send                      |
| 2 serialization on a region's shared pipes  | link.Serializer, lane.Lane           |
| 3 window cap; slow start, again after idle  | link._Window                         |
| 4 jitter that keeps a flow's order          | link.Path._jitter_s, LinkModel.path  |
| 5 loss as a stall, capped by kind of tcp    | link.Path._recovery_s, flow_rate     |
| 6 outages: TCP's backoff, our reconnect     | link._after_outages, sessions.Session|
| 7 asymmetry, pairs, a region's own links    | profiles.WanProfile.link             |
| 8 bytes with framing and codec              | sessions.Session.send                |
| 9 all time from a clock that is given       | pump.Pump on flows.PumpClock         |

`simulate/flows.py` drives the same lanes, pump and paths that the proxy drives on wall time.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt
from statistics import median
from typing import Any

import pytest
import torch

from dd_lightning.algorithm import CODECS
from dd_lightning.network.link import BITS_PER_BYTE
from dd_lightning.network.profiles import SAME_REGION, WanProfile
from dd_lightning.protocol.messages import encode
from dd_lightning.transport.frames import DATA, wire_size
from tests.transport_samples import contribution
from tests.virtual_links import Links, profile

pytestmark = pytest.mark.unit

RTT_S, MBIT_S = 0.08, 80.0  # of `profile()`
NOTHING = {"tcp": "none", "slow_start": False}


def wire_s(num_bytes: int, mbit_s: float = MBIT_S) -> float:
    return num_bytes * BITS_PER_BYTE / (mbit_s * 1e6)


def times(links: Links, *messages: tuple[int, int], way: Any = "up", gap_s: float = 0.0):
    """Seconds that each (learner, bytes) takes; all sent at once, or each `gap_s` after the last
    has come."""
    sessions = {learner: links.connect(learner) for learner, _ in messages}
    taken: list[float] = [0.0] * len(messages)
    left = len(messages)
    for index, (learner, size) in enumerate(messages):
        began = links.time.now

        def arrived(index: int = index, began: float = began) -> None:
            nonlocal left
            taken[index] = links.time.now - began
            left -= 1

        sessions[learner].flows[way, DATA].send(size, arrived)
        if gap_s:
            links.time.run(lambda index=index: left == len(messages) - index - 1)
            links.play(links.time.now + gap_s)
    links.time.run(lambda: left == 0)
    return taken


def test_1_propagation_is_paid_once_however_many_chunks() -> None:
    fast = profile(up_mbit_s=1e6, **NOTHING)
    assert times(Links(fast), (0, 1)) == pytest.approx([RTT_S / 2], abs=1e-6)
    assert times(Links(fast), (0, 10_000_000)) == pytest.approx([RTT_S / 2], abs=1e-3)


def test_2_learners_of_one_region_share_its_pipe_and_take_turns() -> None:
    size = 1_000_000
    alone = times(Links(profile(**NOTHING)), (0, size))
    assert alone == pytest.approx([RTT_S / 2 + wire_s(size)])
    shared = times(Links(profile(**NOTHING)), (0, size), (2, size))
    assert max(shared) == pytest.approx(RTT_S / 2 + wire_s(2 * size))
    assert min(shared) > 0.95 * max(shared)  # in turns: neither waits for all of the other
    apart = times(Links(profile(**NOTHING)), (0, size), (1, size))
    assert apart == pytest.approx(alone * 2)


def test_3_the_window_caps_a_flow_and_it_ramps_up_again_after_an_idle_time() -> None:
    window = profile(window_mib=0.25, slow_start=False)
    (took,) = times(Links(window), (0, 10_000_000))
    assert 10_000_000 / took == pytest.approx(0.25 * 2**20 / RTT_S, rel=0.05)
    size, gap_s = 1_000_000, 3.0
    warm = RTT_S / 2 + wire_s(size)
    kept = times(Links(profile(tcp="bbr")), (0, 5_000_000), (0, size), gap_s=gap_s)[1]
    assert kept == pytest.approx(warm, rel=0.01)  # bbr keeps what it knows
    again = times(Links(profile(tcp="cubic")), (0, 5_000_000), (0, size), gap_s=gap_s)[1]
    assert again > warm + 3 * RTT_S
    assert times(Links(profile(tcp="cubic")), (0, size))[0] == pytest.approx(again, rel=0.02)


def test_4_jitter_delays_and_keeps_the_order() -> None:
    jitter = profile(jitter_ms=50, **NOTHING)
    one, two = (times(Links(jitter, seed), *[(0, 1)] * 200) for seed in (1, 2))
    assert one == sorted(one) and max(one) > RTT_S / 2 + 0.05
    assert one != two and one == times(Links(jitter, 1), *[(0, 1)] * 200)


def test_5_loss_stalls_messages_and_caps_what_backs_off() -> None:
    size, p = 100_000, 0.01
    calm = times(Links(profile(tcp="bbr", slow_start=False)), (0, size))[0]
    lossy = profile(tcp="bbr", loss=p, slow_start=False)
    taken = times(Links(lossy), *[(0, size)] * 100, gap_s=1.0)
    assert median(taken) >= calm
    assert max(taken) > calm + RTT_S  # a packet lost again waits for a timeout
    reno = profile(tcp="reno", loss=p, slow_start=False)
    (took,) = times(Links(reno), (0, 2_000_000))
    mathis_bytes_s = 1448 / RTT_S * sqrt(1.5 / p)
    assert 2_000_000 / took == pytest.approx(mathis_bytes_s, rel=0.15)


@pytest.mark.parametrize("seconds", [1.0, 5.0, 20.0])
def test_6_an_outage_ends_with_tcps_next_try_but_a_learner_has_dialled_before(seconds) -> None:
    outage = {"region": "a", "start_s": 5.0, "seconds": seconds}
    links = Links(profile((outage,)))
    session = links.connect()
    links.play(5.0)
    came: list[float] = []
    session.flows["up", DATA].send(1000, lambda: came.append(links.time.now))
    links.play(5.0 + 2.1 * seconds + 1.0)
    assert 5.0 + seconds <= came[0]
    assert session.open_at_learner == (seconds < 2.0)  # its patience
    over = Links(profile((outage,)))
    over.play(5.0 + seconds)
    assert over.connect().handshake_s == pytest.approx(3 * RTT_S)


def test_7_up_and_down_pairs_and_a_regions_own_links_have_their_own_rates() -> None:
    size = 1_000_000
    asymmetric = profile(up_mbit_s=8, down_mbit_s=80, **NOTHING)
    up, down = (times(Links(asymmetric), (0, size), way=way)[0] for way in ("up", "down"))
    assert up == pytest.approx(RTT_S / 2 + wire_s(size, 8))
    assert down == pytest.approx(RTT_S / 2 + wire_s(size, 80))
    link = profile().links["a", "b"]
    other = replace(link, rtt_ms=200.0)
    wan = WanProfile(
        "test", ("a", "c", "b"), {("a", "b"): link, ("b", "c"): other}, "b", ("a", "c", "b")
    )
    taken = times(Links(wan), (0, 1), (1, 1), (2, 1))
    expected = [link.rtt_ms, other.rtt_ms, SAME_REGION.rtt_ms]
    assert taken == pytest.approx([rtt_ms / 2e3 for rtt_ms in expected], rel=0.01)


@pytest.mark.parametrize(("codec", "width"), [("none", 4), ("bf16", 2)])
def test_8_a_message_is_as_long_as_its_frames(codec: str, width: int) -> None:
    data = CODECS[codec]().encode(torch.zeros(1000))
    links = Links(profile())
    session = links.connect()
    message = contribution(data)
    session.send("up", message, data)
    links.play(5.0)
    framed = wire_size(len(encode(message)), width * 1000)
    assert session.up == links.syncer.wire_bytes(session.name)[0] == framed
    assert session.flows["up", DATA].num_arrived_bytes == framed


def test_9_no_time_passes_but_the_clocks(monkeypatch) -> None:
    def never(*_: Any) -> float:
        raise AssertionError("the wall clock was asked")

    for name in ("time", "monotonic", "sleep"):
        monkeypatch.setattr(f"time.{name}", never)
    links = Links(profile(loss=0.01, jitter_ms=5), controlled=("0",))
    links.network.control({"do": "cut", "learner": "0", "seconds": 1.0})
    assert times(links, (0, 1_000_000))[0] > 0
