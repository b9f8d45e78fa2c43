"""Rounds of a fleet by hand, and what temporary chips bring."""

from __future__ import annotations

from random import Random

import pytest

from dd_lightning.cli import main
from dd_lightning.simulate.fleet_parameters import FleetParameters
from dd_lightning.simulate.goodput import simulate_fleet, simulate_fleet_in_rounds
from dd_lightning.simulate.paper_table import heterogeneous
from dd_lightning.simulate.scavenging import (
    data_parallel_slowdown,
    read_capacity,
    wall_time,
)
from dd_lightning.simulate.waiting import RoundRules, simulate_rounds

pytestmark = pytest.mark.unit

UNEQUAL = (1.0,) * 4 + (1 / 1.18,) * 4


def test_everyone_waiting_for_the_slowest():
    rules = RoundRules(None, "overlap", round_s=10.0, speeds=UNEQUAL)
    found = simulate_rounds([()] * 8, rules, 0.0, 11_795.0, 1)
    assert found.contributors == 8 and found.rounds == 1000
    assert found.stepping[:4] == pytest.approx([1 / 1.18] * 4, abs=1e-3)
    assert found.stepping[4:] == pytest.approx([1.0] * 4)


def test_who_is_slower_than_the_quorum_has_not_waited():
    rules = RoundRules(2, "overlap", round_s=10.0, speeds=(1.0, 1.0, 0.3))
    found = simulate_rounds([(), (), ()], rules, 0.0, 1000.0, 1)
    assert found.stepping[0] == 1.0
    # it needs 33.3 s, is done 6.7 s before the fourth round ends, and waits for that
    assert found.stepping[2] == pytest.approx(33.3333 / 40, abs=0.01)


def test_a_learner_waits_for_one_that_is_dead_and_not_under_never():
    dead = [[(5.0, 105.0)], ()]
    for wait, expected in (("overlap", [0.9, 0.9]), ("never", [0.9, 1.0])):
        rules = RoundRules(None, wait, round_s=10.0)
        assert simulate_rounds(dead, rules, 0.0, 1000.0, 1).stepping == pytest.approx(expected)


def test_a_dead_time_at_a_round_s_end_and_one_over_the_end_of_the_run():
    rules = RoundRules(1, "overlap", round_s=10.0)
    found = simulate_rounds([[(10.0, 20.0), (95.0, 200.0)]], rules, 0.0, 100.0, 1)
    assert found.stepping == pytest.approx([0.85])


def test_grace_lets_the_others_contribute():
    contributors = [
        simulate_rounds(
            [()] * 4, RoundRules(1, "overlap", grace, 10.0, (1, 1, 0.9, 0.5)), 0.0, 1e4, 1
        ).contributors
        for grace in (0.0, 2.0, 20.0)
    ]
    assert contributors[0] < contributors[1] < contributors[2] == 4


def test_the_paper_s_heterogeneous_learners():
    found = heterogeneous(0.1, 1)
    assert found["K=8, wait: overlap"]["goodput"] == pytest.approx(84, abs=1)
    for name in ("K=1, wait: never", "K=1, grace, wait: never"):
        assert found[name]["goodput"] == 100.0
    alone, grace = (found[f"K=1{name}, wait: never"]["contributors"] for name in ("", ", grace"))
    assert alone == pytest.approx(1, abs=0.1) and grace > 3


def test_rounds_in_which_nobody_waits_change_no_goodput():
    parameters = FleetParameters(days=1)
    alone = simulate_fleet(4, 600_000, True, parameters, 1)
    never = simulate_fleet_in_rounds(4, 600_000, True, parameters, RoundRules(1), 1)
    waits = simulate_fleet_in_rounds(4, 600_000, True, parameters, RoundRules(None, "overlap"), 1)
    assert never.row.goodput == pytest.approx(alone.goodput)
    assert waits.row.goodput < never.row.goodput - 5
    assert waits.row.uptime == never.row.uptime == alone.uptime


PAPER = [(0.25, 0.90, 1.07), (0.5, 0.83, 1.09), (1.0, 0.75, 1.02), (3.0, 0.62, 0.80)]


@pytest.mark.parametrize(("extra", "decoupled", "data_parallel"), PAPER)
def test_temporary_chips_as_in_the_paper(extra, decoupled, data_parallel):
    capacity = [(0.5, extra)]
    assert wall_time(capacity) == pytest.approx(decoupled, abs=0.006)
    assert wall_time(capacity, data_parallel_slowdown) == pytest.approx(data_parallel, abs=0.03)


def test_capacity_that_comes_and_goes():
    # 0.5 alone, 0.1 at twice the rate, the rest alone
    assert wall_time([(0.5, 1.0), (0.6, 0.0)]) == pytest.approx(0.9)
    assert wall_time([]) == wall_time([(2.0, 1.0)]) == 1.0
    assert read_capacity("0.5:1,0.6:0") == [(0.5, 1.0), (0.6, 0.0)]


def test_the_slowdown_is_that_of_preemptions_that_repeat_steps():
    # each preemption repeats 20 steps of a fixed global batch; plain loop over steps
    per_unit_s, repeated_steps, step_s, extra = 0.1, 20, 1.0, 0.5
    rng, now, done = Random(1), 0.0, 0
    preempted = rng.expovariate(per_unit_s * extra)
    own_s = step_s / (1 + extra)
    while done < 50_000:
        now, done = now + own_s, done + 1
        while preempted <= now:  # what is repeated is safe: its checkpoint has just been made
            preempted += rng.expovariate(per_unit_s * extra)
            now += repeated_steps * own_s
            preempted += repeated_steps * own_s
    slowdown = now / (done * own_s)
    expected = data_parallel_slowdown(extra, per_unit_s * repeated_steps * step_s)
    assert slowdown == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--quorum", "8", "--learners", "4"], "quorum is 8; allowed: 1 to 4"),
        (["--grace-s", "-1"], "grace_s is -1"),
        (["--round-s", "0"], "round_s is 0"),
        (["--speeds", "1,fast"], "--speeds is '1,fast'"),
        (["--speeds", "0"], "speeds is (0.0,)"),
        (["--scavenge", "half"], "--scavenge is 'half'"),
        (["--scavenge", "0.5:1,0.4:0"], "rising times"),
        (["--scavenge", "0.5:-1"], "extra from 0"),
        (["--table", "paper", "--chips", "5", "--quorum", "1"], "--chips, --quorum: no effect"),
        (["--plot", "/nowhere/figure.png"], "--plot is '/nowhere/figure.png'"),
        (["--plot", "figure.txt"], "allowed: a file in an existing folder, named *.png"),
        (["--mtbi-years", "often"], "argument --mtbi-years: invalid float value"),
        (["--failures", "3"], "unrecognized arguments: --failures 3"),
        (["--table", "ours"], "invalid choice: 'ours'"),
    ],
)
def test_wrong_flags_are_one_line(arguments, said, capsys):
    assert main(["goodput", *arguments]) == 2
    refused = capsys.readouterr().err
    assert said in refused and refused.count("\n") <= 2  # a warning may stand before it
