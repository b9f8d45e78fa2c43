"""The overhead benchmark: its ratios, its network, which steps count."""

import pytest

from dd_lightning.launch.overhead import (
    RTT_MS,
    TRANSFER_STEPS,
    WARM_UP_STEPS,
    Pair,
    Steps,
    StepTimes,
    median_ratios,
    network,
)
from dd_lightning.network import WanProfile

pytestmark = pytest.mark.unit


def steps(milliseconds, count=200, cpu_share=1.0):
    seconds = [milliseconds / 1e3] * count
    return Steps(seconds, cpu_share * sum(seconds))


def test_ratios_are_learner_to_plain():
    ratios = Pair(steps(20), steps(25)).ratios()
    assert ratios == pytest.approx({"rate": 0.8, "p50": 1.25, "p99": 1.25, "cpu": 1.25})


def test_one_slow_step_in_fifty_is_in_p99_and_not_in_p50():
    jerky = Steps(([0.02] * 49 + [0.1]) * 4, 4.0)
    ratios = Pair(steps(20), jerky).ratios()
    assert ratios["p50"] == pytest.approx(1.0) and ratios["p99"] == pytest.approx(5.0)
    assert ratios["rate"] == pytest.approx(50 * 20 / (49 * 20 + 100))


def test_the_median_of_the_pairs_ratios():
    pairs = [Pair(steps(20), steps(slow)) for slow in (20, 25, 100)]
    assert median_ratios(pairs)["p50"] == pytest.approx(1.25)


def test_a_fragment_takes_so_many_steps_to_transfer():
    profile = WanProfile.from_config(network(fragment_bytes=250_000, step_s=0.025))
    link = profile.link(profile.region_of(0))
    assert link.rtt_ms == RTT_MS
    for mbit_s in (link.up_mbit_s, link.down_mbit_s):
        assert 250_000 * 8e-6 / mbit_s == pytest.approx(TRANSFER_STEPS * 0.025)


def test_the_warm_up_and_steps_before_the_moment_do_not_count():
    times = StepTimes()
    times.ends = [(float(i), i / 2) for i in range(WARM_UP_STEPS + 10)]
    assert times.since() == Steps([1.0] * 10, 5.0)
    assert times.since(WARM_UP_STEPS + 4.5) == Steps([1.0] * 4, 2.0)
