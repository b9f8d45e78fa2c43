"""The link model against what was measured over real kernel TCP, and against formulas."""

from math import sqrt
from random import Random
from typing import Any

import pytest

from dd_lightning.network import LinkModel, WanProfile, flow_rate_bit_s, transfer_s
from dd_lightning.network.lane import Flow, Lane, capacity_bytes, chunk_bytes
from dd_lightning.network.link import BITS_PER_BYTE, Serializer, _binomial
from dd_lightning.network.probe import expected_request_s

pytestmark = pytest.mark.unit


def profile(outages: tuple[dict[str, Any], ...] = (), **link: Any) -> WanProfile:
    values = {"rtt_ms": 80, "mbit_s": 100, **link}
    return WanProfile.from_config(
        {"name": "test", "regions": ["a", "c", "b"], "syncer_region": "b", "outages": outages}
        | {"links": {"a-b": values, "c-b": values}, "learner_regions": ["a", "c"]}
    )


# Request and acknowledgement over the user-space TUN link: 80 ms, 100 Mbit/s, cubic.
WARM = [(10_000, 0.082), (100_000, 0.090), (1_000_000, 0.166), (8_000_000, 0.757)]
COLD = [(100_000, 0.25), (1_000_000, 0.585), (8_000_000, 1.10)]  # after 3 s idle


@pytest.mark.parametrize(("num_bytes", "measured_s"), WARM)
def test_warm_requests_agree_with_kernel_tcp(num_bytes: int, measured_s: float) -> None:
    expected = expected_request_s(profile(), "a", num_bytes, warm_up_bytes=20_000_000)
    assert expected == pytest.approx(measured_s, rel=0.05, abs=0.01)


@pytest.mark.parametrize(("num_bytes", "measured_s"), COLD)
def test_cold_requests_agree_with_kernel_tcp(num_bytes: int, measured_s: float) -> None:
    cold = expected_request_s(profile(), "a", num_bytes)
    assert cold == pytest.approx(measured_s, rel=0.15)
    warm = expected_request_s(profile(slow_start=False), "a", num_bytes)
    assert warm == expected_request_s(profile(tcp="none"), "a", num_bytes) < cold


# window MiB, RTT ms, Mbit/s of one stream in a pipe of 300
WINDOWS = [(1 / 16, 20, 28.0), (1 / 4, 20, 101), (1 / 4, 80, 30.1), (1, 80, 110), (4, 80, 261)]


@pytest.mark.parametrize(("window_mib", "rtt_ms", "measured_mbit_s"), WINDOWS)
def test_window_limits_one_flow(window_mib: float, rtt_ms: int, measured_mbit_s: float) -> None:
    wan = profile(window_mib=window_mib, rtt_ms=rtt_ms, mbit_s=300)
    seconds = LinkModel(wan).path("a", "up").send(0.0, 100_000_000)
    assert 800 / seconds == pytest.approx(measured_mbit_s, rel=0.15)


@pytest.mark.parametrize("scale", [1.0, 0.01])
@pytest.mark.parametrize("tcp", ["reno", "cubic"])
def test_loss_limits_loss_based_control(tcp: str, scale: float) -> None:
    link = profile(tcp=tcp, loss=0.01).link("a").scaled(scale)
    mathis = 1448 * 8 / 0.08 * sqrt(1.5 / 0.01)
    assert flow_rate_bit_s(link, "up") * 1448 / 1500 == pytest.approx(scale * mathis)


def test_loss_of_one_percent_hardly_slows_bbr() -> None:
    path = LinkModel(profile(tcp="bbr", loss=0.01)).path("a", "up")
    for _ in range(1000):
        end = path.send(0.0, 65_536)
    assert 0.5 * 100 < 65.536e6 * 8 / end / 1e6 < 100
    assert flow_rate_bit_s(profile(tcp="bbr", loss=0.01).link("a"), "up") == 100e6


@pytest.mark.parametrize(("outage_s", "measured_s"), [(2, 2.39), (5, 10.3), (10, 18.7), (20, 37.2)])
def test_outage_costs_up_to_twice_its_length(outage_s: float, measured_s: float) -> None:
    model = LinkModel(profile(({"region": "a", "start_s": 5, "seconds": outage_s},)))
    up, down = model.path("a", "up"), model.path("a", "down")
    now = worst = 0.0
    while now < 60:
        begin, now = now, down.send(up.send(now, 100_000), 1)
        worst = max(worst, now - begin)
    assert worst == pytest.approx(measured_s, rel=0.15)
    assert outage_s <= worst <= 2.1 * outage_s + 1


@pytest.mark.parametrize(("outage_s", "tried_s"), [(0.5, 1.0), (2, 3.0), (5, 7.0), (10, 15.0)])
def test_a_new_connection_in_an_outage_waits_for_the_next_syn(outage_s, tried_s) -> None:
    model = LinkModel(profile(({"region": "a", "start_s": 5, "seconds": outage_s},)))
    assert model.path("a", "up").dial(5.0) == pytest.approx(5.0 + tried_s + 0.04)
    # whoever dials anew just after the link's return is there a one-way delay later
    assert model.path("a", "up").dial(5.0 + outage_s) == pytest.approx(5.0 + outage_s + 0.04)


def test_outage_of_one_region_leaves_the_other() -> None:
    outages = ({"region": "a", "start_s": 0, "seconds": 5},)
    model, quiet = LinkModel(profile(outages)), LinkModel(profile())
    assert model.path("a", "up").send(1.0, 1000) > 5
    assert model.path("c", "up").send(1.0, 1000) == quiet.path("c", "up").send(1.0, 1000)


def test_outages_are_counted_from_the_start() -> None:
    outages = ({"region": "a", "start_s": 2, "seconds": 5},)
    model = LinkModel(profile(outages), start=100.0)
    assert model.path("a", "up").send(1.0, 1000) < 2
    assert model.path("a", "up").send(103.0, 1000) > 107


def test_outages_in_step_with_the_timeouts_end() -> None:
    outages = ({"region": "a", "start_s": 0, "seconds": 0.9, "every_s": 1.0},)
    assert LinkModel(profile(outages)).path("a", "up").send(0.0, 1000) < 60


def test_outages_without_a_gap_are_called_unusable() -> None:
    outages = tuple(
        {"region": "a", "start_s": start, "seconds": 10, "every_s": 20} for start in (0, 10)
    )
    with pytest.raises(RuntimeError, match="no gap"):
        LinkModel(profile(outages)).path("a", "up").send(0.0, 1000)


def test_idle_cubic_starts_again_and_bbr_does_not() -> None:
    def after_idle(tcp: str) -> float:
        path = LinkModel(profile(tcp=tcp)).path("a", "up")
        path.send(0.0, 20_000_000)
        return path.send(100.0, 1_000_000) - 100

    assert after_idle("bbr") == pytest.approx(after_idle("none"))
    assert after_idle("cubic") > 3 * after_idle("bbr")


def test_small_talk_does_not_open_the_window() -> None:
    path = LinkModel(profile()).path("a", "up")
    for step in range(100):
        path.send(step * 0.1, 100)
    cold = LinkModel(profile()).path("a", "up").send(0.0, 1_000_000)
    assert path.send(10.0, 1_000_000) - 10 == pytest.approx(cold, rel=0.02)


def test_transfer_time_is_bytes_over_rate_and_follows_the_scale() -> None:
    link = profile().link("a")
    assert transfer_s(link, 12_500_000) == pytest.approx(1500 / 1448)
    assert transfer_s(link.scaled(0.01), 125_000) == pytest.approx(1500 / 1448)


def test_binomial_has_its_mean_and_variance() -> None:
    rng = Random(0)
    draws = [_binomial(rng, 50, 0.1) for _ in range(4000)]
    mean = sum(draws) / len(draws)
    assert mean == pytest.approx(5, rel=0.05)
    assert sum((x - mean) ** 2 for x in draws) / len(draws) == pytest.approx(4.5, rel=0.1)


def test_flows_of_one_region_get_equal_shares() -> None:
    wan = profile(tcp="none")
    model = LinkModel(wan)
    lane = Lane(model.serializer("a", "up"))
    flows = [Flow(model.path("a", "up"), 10**9) for _ in range(3)]
    for flow in flows:
        flow.push(0.0, bytes(2_000_000))
        lane.enlist(flow)
    now, got = 0.0, dict.fromkeys(flows, 0)
    while now < 0.25:  # 0.21 s after the first arrival, of 0.5 s in all
        lane.pump(now)
        for flow in flows:
            while (data := flow.pop_arrived(now)) is not None:
                got[flow] += len(data)
        now += 0.001
    shares = [size / sum(got.values()) for size in got.values()]
    assert shares == pytest.approx([1 / 3] * 3, rel=0.1)
    assert sum(got.values()) == pytest.approx((0.25 - 0.04) * 100e6 / BITS_PER_BYTE, rel=0.05)


def test_a_held_back_flow_does_not_take_the_lane() -> None:
    """One flow crawls (loss), the other has the pipe as if it were alone."""
    slow = LinkModel(profile(loss=0.1)).path("a", "up")
    model = LinkModel(profile(tcp="none"))
    slow._serializer = model.serializer("a", "up")
    lane = Lane(model.serializer("a", "up"))
    crawler, runner = Flow(slow, 10**9), Flow(model.path("a", "up"), 10**9)
    for flow in (crawler, runner):
        flow.push(0.0, bytes(1_000_000))
        lane.enlist(flow)
    now = 0.0
    while runner.waiting:
        lane.pump(now)
        now += 0.001
    assert now == pytest.approx(1e6 * BITS_PER_BYTE / 100e6, rel=0.15)
    assert crawler.waiting


@pytest.mark.parametrize("mbit_s", [0.1, 10, 1000])
def test_capacity_is_bounded_and_keeps_the_pipe_full(mbit_s: float) -> None:
    link = profile(mbit_s=mbit_s).link("a")
    capacity, chunk = capacity_bytes(link, "up"), chunk_bytes(link, "up")
    one_way = mbit_s * 1e6 / 8 * 0.04 * 1448 / 1500
    assert one_way + chunk <= capacity <= 2 * one_way + 3 * chunk + 65_536
    assert capacity_bytes(profile(window_mib=1, mbit_s=1e5).link("a"), "up") <= 2**19 + 2**17


def test_serializer_queues() -> None:
    pipe = Serializer(BITS_PER_BYTE * 1000)  # 1000 bytes a second
    assert pipe.reserve(0.0, 500) == 0.5
    assert pipe.reserve(0.1, 500) == 1.0
    assert pipe.reserve(5.0, 500) == 5.5
