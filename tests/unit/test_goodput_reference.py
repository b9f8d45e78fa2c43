"""The fleet simulation against closed forms and against a loop over every chip."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from dd_lightning.simulate.fleet_parameters import YEAR_S, FleetParameters
from dd_lightning.simulate.goodput import simulate_fleet
from dd_lightning.simulate.recovery_time import ExponentiatedWeibull
from tests.fleet_reference import Chips, play

pytestmark = pytest.mark.unit

CHIPS, SLICE, DAYS = 64, 4, 0.5
EXPONENTIAL = {"a": 1.0, "c": 1.0}


def both(learners, elastic, gap_s, recovery_s, **times):
    """(goodput, uptime) of ours and of the reference; a learner fails every `gap_s`."""
    life_s = gap_s * CHIPS
    parameters = FleetParameters(
        mtbi_years=life_s / YEAR_S,
        slice_chips=SLICE,
        recovery=ExponentiatedWeibull(recovery_s, **EXPONENTIAL),
        days=20 * DAYS,
        **times,
    )
    ours = simulate_fleet(learners, CHIPS * learners, elastic, parameters, 3)
    chips = [
        Chips(CHIPS, SLICE, life_s, **times, recovery_s=recovery_s, rng=Random(k), elastic=elastic)
        for k in range(learners)
    ]
    return (ours.goodput, ours.uptime), play(chips, DAYS * 86400)


TIMES = {"downscale_s": 20.0, "upscale_s": 30.0, "upscale_batch_s": 100.0, "step_s": 10.0}


@pytest.mark.parametrize(
    ("learners", "elastic", "gap_s", "recovery_s", "times"),
    [
        (4, True, 300.0, 60.0, TIMES),
        (4, True, 60.0, 200.0, TIMES),  # many slices are away at once
        (4, True, 60.0, 60.0, TIMES | {"step_s": 0.0, "upscale_batch_s": 0.0}),
        (4, False, 300.0, 60.0, TIMES),
        (4, False, 60.0, 60.0, TIMES | {"step_s": 0.0}),
    ],
)
def test_every_chip_by_itself_gives_the_same(learners, elastic, gap_s, recovery_s, times):
    ours, reference = both(learners, elastic, gap_s, recovery_s, **times)
    assert ours == pytest.approx(reference, abs=2.0)
    assert 5 < ours[0] < 97  # the case shows something


def rate(parameters, chips):
    return chips * parameters.failures_per_chip_s


@pytest.mark.parametrize("chips", [150_000, 600_000, 2_400_000])
def test_a_rigid_learner_is_a_renewal_process(chips):
    parameters = FleetParameters(days=20)
    failures, step = rate(parameters, chips), parameters.step_s
    dead = parameters.downscale_s + parameters.recovery.mean_s + parameters.upscale_s
    whole_steps_s = step / (exp(failures * step) - 1)  # of an exponential stretch
    expected = 100 * whole_steps_s / (1 / failures + dead)
    found = simulate_fleet(1, chips, False, parameters, 1)
    assert found.goodput == pytest.approx(expected, rel=0.02)
    assert found.uptime == pytest.approx(100 / (1 + failures * dead), rel=0.02)


def test_an_elastic_learner_that_takes_slices_back_at_no_cost_is_one_too():
    parameters = FleetParameters(days=20, upscale_s=0, upscale_batch_s=0, step_s=0)
    failures = rate(parameters, 600_000)
    found = simulate_fleet(1, 600_000, True, parameters, 1)
    expected = 100 / (1 + failures * parameters.downscale_s)
    assert found.goodput == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("elastic", [True, False])
def test_without_failures_everything_is_goodput(elastic):
    parameters = FleetParameters(mtbi_years=1e12)
    found = simulate_fleet(1, 2_400_000, elastic, parameters, 1)
    assert found.goodput == found.uptime == 100.0


def test_most_slices_away_do_not_fail_again():
    # a slice away for good: each of the ten strikes once, the learner dies out
    parameters = FleetParameters(
        mtbi_years=1e-5, days=1, slice_chips=64, recovery=ExponentiatedWeibull(1e9, **EXPONENTIAL)
    )
    found = simulate_fleet(1, 640, True, parameters, 1)
    assert found.uptime > 99 and 0 <= found.goodput < 0.1
