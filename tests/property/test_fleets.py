"""Random fleets: the real core, links and ledgers under loss, repetition, delay, kills, cuts,
pauses and restarts of the syncer.

Asserted after every event (`tests/fleet_checks.py`): nothing is merged twice; processed = merged +
lost + pending per incarnation and fragment, and merged is what the oracle saw merged; versions only
grow; no round is open for longer than `round_timeout`; nothing that is kept grows with the length
of the run; no learner holds as unsettled what is settled, unless it has not heard of its merge.
Asserted at the end: every run with somebody alive ends, with nothing pending.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.fleet import Fleet
from tests.fleet_plans import ALL_FAULTS, LEARNER_FAULTS, draw_plan

pytestmark = pytest.mark.property
LONGEST_S = 5000.0  # of virtual time: far beyond all timeouts and 120 steps of 2 s
QUIET = settings(
    deadline=None,
    print_blob=True,
    phases=[p for p in Phase if p is not Phase.shrink],  # a plan says enough; shrinking takes long
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def play(r: random.Random, faults: tuple[str, ...]) -> Fleet:
    """A fleet to its end, which is reached unless nobody came back to a resumed syncer."""
    fleet = draw_plan(r, faults).fleet().run(LONGEST_S)
    run = fleet.core.run
    nobody_came_back = run.restored_training is not None and not run.ever_joined
    if fleet.done is None and nobody_came_back:
        assert not any(life.alive and not life.ended for life in fleet.current.values())
        return fleet
    for rows in fleet.finish().values():
        for row in rows:
            assert row["processed"] == row["merged"] + row["lost"]
    return fleet


@settings(QUIET, max_examples=25)
@given(st.randoms(use_true_random=False))
def test_without_faults_nothing_is_lost_but_what_the_apply_mode_costs(r) -> None:
    fleet = play(r, ())
    assert fleet.done is not None and fleet.done.status == "finished"
    passed_over = {"overlap", "absent"}  # of mix: by a contribution that overtook word of an apply
    costs = {"overwrite": passed_over, "mix": {"mixed", *passed_over}, "rebase": set()}
    lost = {event["cause"] for event in fleet.events("lost")}
    # `unsent`: a link that carries less than it is asked for runs into `timeouts.flush`
    assert lost <= costs[fleet.config.algorithm.apply] | {"unsent"}
    assert {event["generation"] for event in fleet.events("join")} == {1}
    assert all(life.told or life.ledger.step == life.spec.steps for life in fleet.lives)


@settings(QUIET, max_examples=30)
@given(st.randoms(use_true_random=False))
def test_learners_die_are_cut_off_pause_and_come_back(r) -> None:
    fleet = play(r, LEARNER_FAULTS)
    assert fleet.epoch == 1
    assert "rollback" not in {event["cause"] for event in fleet.events("lost")}


@settings(QUIET, max_examples=30)
@given(st.randoms(use_true_random=False))
def test_the_syncer_dies_too(r) -> None:
    fleet = play(r, ALL_FAULTS)
    keys = [(event["epoch"], event["round"]) for event in fleet.events("round_open")]
    assert keys == sorted(set(keys))


FOUND_SOMETHING = (1168, 1542, 1654, 1847)


@pytest.mark.parametrize("seed", [*range(40), *FOUND_SOMETHING])
def test_seeded_fleets(seed) -> None:
    """The same everywhere and for ever, where hypothesis varies; uniform, where it likes small."""
    play(random.Random(seed), ALL_FAULTS)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(10))
def test_many_seeded_fleets(hundred) -> None:
    for seed in range(1000 + 100 * hundred, 1100 + 100 * hundred):
        play(random.Random(seed), ALL_FAULTS)


def test_a_seed_is_repeated_event_for_event() -> None:
    first, second = (play(random.Random(7), ALL_FAULTS) for _ in range(2))
    assert first.tape == second.tape and first.num_events == second.num_events
