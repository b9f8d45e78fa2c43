"""`replay --merge, --outer, --quorum`: the same arrivals under other rules, beside the original."""

from __future__ import annotations

import json
import warnings

import pytest

from dd_lightning.cli import main
from dd_lightning.protocol.tape import read_tape
from dd_lightning.simulate.replay_reader import ScriptReader
from dd_lightning.simulate.replay_script import MergeStep
from dd_lightning.simulate.what_if import with_quorum
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


@pytest.fixture(scope="module")
def run(simulate):  # noqa: F811
    """Three learners of three speeds, K = 1: some contributions come too late."""
    speeds = ["simulate.speeds=[1,0.8,0.5]", "simulate.distribution=normal", "simulate.jitter=0.1"]
    folder, _ = simulate("learners=3", "network=us_eu", "trainer.max_steps=36", *speeds)
    return folder


@pytest.fixture(scope="module")
def script(run):
    return ScriptReader().read(read_tape(run / "tape.jsonl"))


def asked(capsys, folder, *options):
    """(exit code, what `--json` printed)."""
    capsys.readouterr()
    code = main(["replay", str(folder), "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def contributors(script):
    return [
        [given.learner for given in step.contributions]
        for step in script.course
        if isinstance(step, MergeStep)
    ]


def test_the_run_s_own_quorum_takes_the_same_contributions(script):
    same, left_out = with_quorum(script, 1)
    assert contributors(same) == contributors(script)
    assert left_out == 0


def test_a_larger_quorum_takes_late_ones_in_but_none_of_the_last_rounds(script):
    assert script.late
    larger, _ = with_quorum(script, 3)
    rows = [step for step in script.course if isinstance(step, MergeStep)]
    more = 0
    for step, before, after in zip(rows, contributors(script), contributors(larger), strict=True):
        assert set(before) <= set(after)
        late = {given.learner for given in script.late.get(step.key, ())}
        assert set(after) <= set(before) | late
        if step.row["last"]:
            assert after == before
        more += len(after) > len(before)
    assert more


def test_a_what_if_that_changes_nothing_is_the_run_and_says_so(capsys, run):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        code, found = asked(capsys, run, "--set", "algorithm.merge=rda")
    assert any("has no effect" in str(one.message) for one in said)
    asked_for = found["what_if"]
    assert code == 0 and len(asked_for["rounds"]) == found["merges"]
    assert asked_for["rounds_changed"] == 0
    for row in asked_for["rounds"]:  # the tape's numbers, computed anew
        assert row["outer_norm"]["what_if"] == row["outer_norm"]["original"]
        assert row["agreement"]["what_if"] == row["agreement"]["original"]
    loss = asked_for["means"]["validation loss"]
    assert loss["what_if"] == loss["original"]


def test_another_rule_optimizer_and_quorum_are_reported_beside_the_original(capsys, run):
    options = ["--merge", "average", "--outer", "lr=1.0", "--quorum", "3"]
    code, found = asked(capsys, run, *options, "--set", "algorithm.weights=uniform")
    asked_for = found["what_if"]
    assert code == 0 and found["equal"]
    assert asked_for["set"] == {
        "algorithm.merge": "average", "algorithm.outer": {"lr": 1.0}, "algorithm.quorum": 3,
        "algorithm.weights": "uniform",
    }  # fmt: skip
    means = asked_for["means"]
    assert means["contributors"]["what_if"] > means["contributors"]["original"]
    assert means["validation loss"]["what_if"] != means["validation loss"]["original"]
    assert asked_for["rounds_changed"] > 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--set", "algorithm.apply=mix"], "allowed keys: algorithm.merge"),
        (["--set", "merge"], "allowed: KEY=VALUE"),
        (["--quorum", "9"], "algorithm.quorum is 9"),
        (["--quorum", "0"], "algorithm.quorum is 0"),
        (["--merge", "median"], "median"),
        (["--outer", "lr=1.0,nesterov"], "--outer is"),
        (["--outer", "speed=3"], "speed"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_anything_is_played(capsys, run, options, text):
    assert main(["replay", str(run), *options]) == 2
    said = capsys.readouterr()
    assert text in said.err and not said.out
