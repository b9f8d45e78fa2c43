"""The figures of the failures bench, from logs and figures made by hand."""

import dataclasses

import pytest

from dd_lightning.launch.failures import RunFigures, checks, result
from dd_lightning.launch.step_log import Step, read_steps

pytestmark = pytest.mark.unit

GOOD = RunFigures(
    seconds=250.0,
    uptime=1.0,
    goodput=0.90,
    alive_share=0.93,
    validation_loss=1.50,
    tokens_merged=8e6,
    kills={"learner 0": 3},
    joins={"0": 4},
    steps=1000,
    step_ms_p50=60.0,
    step_ms_p99=66.0,
    boundary_ms_p50=0.3,
    boundary_ms_p99=1.2,
)


def broken(disturbed, undisturbed=GOOD):
    return [check.what for check in checks(disturbed, undisturbed) if not check.kept]


def test_a_run_as_good_as_the_undisturbed_one_keeps_every_promise():
    assert broken(GOOD) == [] and result(GOOD, GOOD)["kept"]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"uptime": 0.9999}, "uptime"),
        ({"goodput": 0.95 * 0.93 - 1e-6}, "goodput"),
        ({"validation_loss": 1.50 * 1.06}, "loss / undisturbed"),
        ({"step_ms_p99": 66.0 * 1.21}, "p99 step / undisturbed"),
        ({"boundary_ms_p99": 2.01}, "p99 boundary, ms"),
    ],
)
def test_each_promise_can_be_broken_alone(change, what):
    worse = dataclasses.replace(GOOD, **change)
    assert broken(worse) == [what] and not result(worse, GOOD)["kept"]


def test_a_slow_boundary_may_be_half_as_long_again_as_the_undisturbed_one():
    slow = dataclasses.replace(GOOD, boundary_ms_p99=4.0)
    assert broken(dataclasses.replace(GOOD, boundary_ms_p99=5.9), slow) == []
    assert broken(dataclasses.replace(GOOD, boundary_ms_p99=6.1), slow) == ["p99 boundary, ms"]


def test_steps_are_read_by_incarnation_without_what_a_kill_tore(tmp_path):
    rows = "11,0.060000,0.000300\n11,0.061000,0.000400\n11,0.06"  # killed here
    (tmp_path / "steps.csv").write_text(rows + "12,0.070000,0.000500\n12,0.071000,0.000600\n")
    assert read_steps(tmp_path) == [
        [Step(0.06, 0.0003), Step(0.061, 0.0004)],
        [Step(0.071, 0.0006)],
    ]
