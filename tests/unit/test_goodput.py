"""The fleet simulation against closed forms, the paper's table, and failure logs."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from dd_lightning.cli import main
from dd_lightning.simulate.failure_sources import FailureTrace
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import (
    LearnerTime,
    simulate_elastic,
    simulate_fleet,
    simulate_rigid,
    uptime,
)
from dd_lightning.simulate.paper_table import PAPER, errors, paper_rows, paper_value
from dd_lightning.simulate.recovery_time import ExponentiatedWeibull
from dd_lightning.simulate.waiting import RoundRules, simulate_rounds

pytestmark = pytest.mark.unit


BY_HAND = {"downscale_s": 16.0, "upscale_s": 14.0, "upscale_batch_s": 120.0, "step_s": 0.0}


def fixed(*failures: tuple[float, float]):
    return iter([(*failure, 1.0) for failure in failures])


@pytest.fixture(scope="module")
def table():
    return paper_rows(FleetParameters(), 1)


def test_one_failure_costs_a_rigid_learner_its_downscale_recovery_and_upscale():
    found = simulate_rigid(fixed((100.0, 50.0)), FleetParameters(days=1, **BY_HAND))
    assert found.dead == [(100.0, 180.0)]
    assert found.good_s == 86400 - 80


def test_one_failure_costs_an_elastic_learner_two_dead_times_and_its_slice_meanwhile():
    parameters = FleetParameters(days=1, **BY_HAND)
    found = simulate_elastic(fixed((100.0, 50.0)), 10, parameters)
    # down 100..116, back at 150, joins at 270..284, a tenth of the chips away in between
    assert found.dead == [(100.0, 116.0), (270.0, 284.0)]
    assert found.good_s == pytest.approx(86400 - 16 - 14 - (270 - 116) / 10)


def test_failures_within_a_dead_time_are_absorbed():
    one = simulate_elastic(fixed((100.0, 1e6)), 10, FleetParameters(days=1, **BY_HAND))
    two = simulate_elastic(
        fixed((100.0, 1e6), (110.0, 1e6)), 10, FleetParameters(days=1, **BY_HAND)
    )
    assert two.dead == one.dead and two.failures == 2
    assert two.good_s == pytest.approx(100 + (86400 - 116) * 0.8)


def test_slices_that_return_in_a_dead_time_join_after_it_and_time_never_runs_back():
    parameters = FleetParameters(days=1, **BY_HAND)
    # the first slice is due to join at 270, within the second failure's dead time 265..281
    found = simulate_elastic(fixed((100.0, 50.0), (265.0, 1e6)), 10, parameters)
    assert found.dead == [(100.0, 116.0), (265.0, 281.0), (281.0, 295.0)]
    assert found.good_s == pytest.approx(100 + (265 - 116) * 0.9 + (86400 - 295) * 0.9)


def test_a_failure_loses_the_step_in_progress_and_an_upscale_none():
    parameters = FleetParameters(days=1, **BY_HAND | {"step_s": 30.0})
    rigid = simulate_rigid(fixed((100.0, 50.0)), parameters)
    assert rigid.good_s == 86400 - 80 - 10
    elastic = simulate_elastic(fixed((100.0, 50.0)), 10, parameters)
    assert elastic.good_s == pytest.approx(86400 - 16 - 14 - (270 - 116) / 10 - 10)
    assert elastic.alive == pytest.approx(1 - 30 / 86400)


def test_a_failure_of_a_slice_that_is_away_strikes_nothing():
    parameters = FleetParameters(days=1, **BY_HAND)
    strikes = [(100.0, 1e6, 0.9), (200.0, 1e6, 0.05), (300.0, 1e6, 0.5)]
    found = simulate_elastic(iter(strikes), 10, parameters)
    assert found.failures == 2 and [start for start, _ in found.dead] == [100.0, 300.0]


def test_the_mean_of_the_recovery_distribution_is_what_was_asked():
    distribution = ExponentiatedWeibull(46.0, 2.0, 0.8)
    drawn = list(itertools.islice(distribution.draws(np.random.default_rng(0)), 100_000))
    assert np.mean(drawn) == pytest.approx(46.0, rel=0.02)


@pytest.mark.parametrize("at_s", [5.0, 30.0, 150.0])
def test_recovery_times_are_distributed_as_the_formula_says(at_s):
    distribution = ExponentiatedWeibull(46.0, 2.0, 0.8)
    drawn = np.array(list(itertools.islice(distribution.draws(np.random.default_rng(0)), 100_000)))
    expected = (1 - np.exp(-((at_s / distribution.scale_s) ** 0.8))) ** 2.0
    assert np.mean(drawn <= at_s) == pytest.approx(expected, abs=0.005)


def test_a_grace_window_ends_early_when_everybody_is_there():
    rules = RoundRules(1, "overlap", grace_s=1000.0, round_s=100.0, speeds=(1.0, 0.8))
    found = simulate_rounds([(), ()], rules, 0.0, 1000.0, 1)
    assert (found.rounds, found.contributors) == (8, 2.0)
    assert found.stepping == pytest.approx((0.8, 1.0))


def test_waiting_beyond_the_end_of_the_simulation_is_not_counted():
    rules = RoundRules(None, "overlap", round_s=100.0, speeds=(1.0, 0.8))
    found = simulate_rounds([(), ()], rules, 0.0, 110.0, 1)
    assert found.stepping == pytest.approx((100 / 110, 1.0))


def test_uptime_counts_only_moments_at_which_all_are_dead():
    times = [LearnerTime(100.0, dead=[(10.0, 30.0)]), LearnerTime(100.0, dead=[(20.0, 40.0)])]
    assert uptime(times) == pytest.approx(0.9)


def test_the_papers_table_within_two_points_on_average_and_five_at_most(table):
    assert len(table) == 30
    mean, largest = errors(table)
    assert mean <= 2 and largest <= 5
    predicted = [row for row in table if row.learners > 1]
    assert max(abs(row.goodput - paper_value(row)) for row in predicted) <= 4


def test_uptime_is_100_percent_from_four_learners_on_as_the_paper_rounds_it(table):
    assert all(round(row.uptime) == 100 for row in table if row.learners >= 4)
    assert all(row.uptime > 99.99 for row in table if row.learners >= 8)


def test_a_month_of_2_4_million_chips():
    parameters = FleetParameters(days=30)
    month = simulate_fleet(16, 2_400_000, True, parameters, 1)  # under a second: no time asserted
    assert month.goodput == pytest.approx(86, abs=4)


def test_the_same_seed_gives_the_same_rows_and_another_seed_others():
    parameters = FleetParameters(days=1)
    first = simulate_fleet(4, 600_000, True, parameters, 1)
    assert simulate_fleet(4, 600_000, True, parameters, 1) == first
    assert simulate_fleet(4, 600_000, True, parameters, 2) != first


def test_a_log_of_failures_takes_the_place_of_the_distribution(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("time,component,seconds_down\n100,a,50\n40000,b,50\n")
    trace = FailureTrace.read(log)
    parameters = FleetParameters(days=0.5, slice_chips=100)
    one = simulate_fleet(1, 1000, True, parameters, 1, trace)
    two = simulate_fleet(2, 1000, True, parameters, 1, trace)
    assert one.goodput < 100 and two.uptime == 100
    assert list(itertools.islice(trace.of_learner(0, 2), 2)) == [
        (100.0, 50.0, 1.0),
        (40150.0, 50.0, 1.0),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("time,component\n1,a\n", "lacks the columns seconds_down"),
        ("time,component,seconds_down\nx,a,1\n", "line 2"),
        ("time,component,seconds_down\n-1,a,1\n", "allowed: finite"),
        ("time,component,seconds_down\n", "no rows"),
        ("time,component,seconds_down\n0,a,0\n", "ends at 0 s"),
        (b"\xff\xfe", "is not a text file"),
    ],
)
def test_a_log_that_makes_no_sense_is_refused(tmp_path, text, said):
    log = tmp_path / "log.csv"
    log.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match=said):
        FailureTrace.read(log)


@pytest.mark.parametrize("name", ["mtbi_years", "days", "slice_chips"])
def test_parameters_out_of_range_are_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name} is 0"):
        FleetParameters(**{name: 0})


def test_the_command_prints_the_promised_json(capsys):
    arguments = ["--learners", "1,4", "--chips", "600000", "--mtbi-years", "1", "--seed", "1"]
    assert main(["goodput", *arguments, "--days", "0.2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shape = [(row["learners"], row["elastic"], row["chips"]) for row in found["rows"]]
    assert shape == [(1, False, 600_000), (1, True, 600_000), (4, True, 600_000)]
    assert all(0 < row["goodput"] < 100 and 0 < row["uptime"] <= 100 for row in found["rows"])
    assert found["parameters"]["mtbi_years"] == 1.0


def test_the_command_shows_the_papers_figures_beside_ours(capsys, tmp_path):
    assert (
        main(["goodput", "--table", "paper", "--days", "1", "--plot", str(tmp_path / "f.png")]) == 0
    )
    said = capsys.readouterr().out
    for row in PAPER.values():
        assert all(f"| {value}" in said for value in row)
    assert (tmp_path / "f.png").stat().st_size > 1000


def test_a_wrong_number_of_learners_is_one_line(capsys):
    assert main(["goodput", "--learners", "none"]) == 2
    assert "--learners is 'none'; allowed: integers" in capsys.readouterr().err


SMALL = ["goodput", "--learners", "2", "--chips", "1000", "--days", "1"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--seed", "-1"], "--seed is -1; allowed: an integer >= 0."),
        (["--mtbi-years", "1e-9"], "mtbi_years is 1e-09, which makes 3e+09 failures; allowed"),
        (["--round-s", "1e-9"], "round_s is 1e-09, which makes 2e+14 rounds; allowed"),
        (["--scavenge", "nan:1"], "capacity is [(nan, 1.0)]; allowed"),
        (["--scavenge", "0.5:nan"], "capacity is [(0.5, nan)]; allowed"),
    ],
)
def test_what_would_not_end_or_means_nothing_is_one_line(flags, said, capsys):
    assert main([*SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--trace", "LOG", "--mtbi-years", "3", "--recovery-a", "1"],
         "warning: --mtbi-years, --recovery-a: no effect with --trace"),
        (["--speed-jitter", "0.5"], "warning: --speed-jitter: no effect where no rounds are"),
        (["--speeds", "1,0.5"], "warning: --wait never: nobody waits"),
        (["--speeds", "1,0.5", "--wait", "overlap", "--speed-jitter", "0.2"], ""),
    ],
)  # fmt: skip
def test_flags_without_effect_are_said(flags, said, capsys, tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("time,component,seconds_down\n100,a,50\n")
    assert main([*SMALL, *(str(log) if flag == "LOG" else flag for flag in flags)]) == 0
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == bool(said)
