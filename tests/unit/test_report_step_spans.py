"""Who computes and sends when, from a record of steps and a tape whose figures are known."""

from __future__ import annotations

import pytest

from dd_lightning.report.step_spans import SPANS, Lanes, Span
from dd_lightning.simulate.step_record import StepRecord

pytestmark = pytest.mark.unit

NETWORK = {
    "name": "two",
    "regions": ["here", "there"],
    "syncer_region": "here",
    "learner_regions": ["there"],
    "links": {"there-here": {"rtt_ms": 100, "mbit_s": 8}},
    "bandwidth_scale": 1.0,
    "outages": [],
    "assumed": [],
    "source": "",
}


@pytest.fixture
def lanes():
    """Of two learners whose median steps take 0.2 and 0.3 s."""
    learners = {"0": {"step_seconds_p50": 0.2}, "1": {"step_seconds_p50": 0.3}}
    return Lanes({"network": NETWORK}, {"per_learner": learners})


def test_a_contribution_is_on_its_way_for_half_a_round_trip_and_its_bytes(lanes, tmp_path):
    record_of = {name: tmp_path / "learners" / name for name in "01"}
    for folder in record_of.values():
        folder.mkdir(parents=True)
        clock = iter([1.0, 1.25, 1.5, 1.75])
        record = StepRecord(folder, lambda clock=clock: next(clock))
        for _ in range(2):
            record.begin()
            record.end()
    lanes.feed({"event": "contribution", "t_s": 3.0, "learner": "1", "bytes": 100_000})
    found = lanes.lanes(tmp_path)
    assert found["1"].computing == (Span(1.0, 1.25), Span(1.5, 1.75))
    assert found["0"].sending == ()
    (sending,) = found["1"].sending
    # 0.05 s of delay and 0.8 Mbit at 8 Mbit/s
    assert sending.ended_s == 3.0 and sending.began_s == pytest.approx(3.0 - 0.05 - 0.1)


def test_members_compute_then_the_all_reduce_sends_for_all(lanes, tmp_path):
    step = {"event": "all_reduce", "t_s": 2.0, "compute_s": 0.3, "reduce_s": 0.5}
    lanes.feed({**step, "members": ["0", "1"]})
    found = lanes.lanes(tmp_path)
    for name, step_s in (("0", 0.2), ("1", 0.3)):
        (computing,) = found[name].computing
        assert (computing.began_s, computing.ended_s) == pytest.approx((1.2, 1.2 + step_s))
        (sending,) = found[name].sending
        assert (sending.began_s, sending.ended_s) == pytest.approx((1.5, 2.0))


def test_a_run_without_a_record_says_which_setting_makes_one(lanes, tmp_path):
    with pytest.raises(ValueError, match=r"virtual_steps.csv is missing.*launcher.step_log=true"):
        lanes.lanes(tmp_path)
    assert SPANS == "virtual_steps.csv"
