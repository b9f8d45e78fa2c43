"""Applies that the syncer may not have heard of: kept until an answer proves that it has."""

import pytest

from dd_lightning.protocol.messages import Applied
from dd_lightning.protocol.unheard import MOST, UnheardApplies
from tests.fleet import Fleet
from tests.fleet_learner import Spec

pytestmark = pytest.mark.unit


def applied(step, fragment=0):
    return Applied(
        generation=1, step=step, fragment=fragment, version=(1, step), odometer=0, steps=0,
        tokens=0, tokens_before=0,
    )  # fmt: skip


def steps(unheard):
    return [done[0] for done in unheard.all]


def test_an_answer_proves_what_was_said_before_its_report_and_no_more():
    unheard = UnheardApplies()
    for step, ping in ((1, 0), (2, 1), (3, 1), (4, 2)):
        unheard.said(applied(step), ping)
    unheard.answered(1)  # the report numbered 1 came after step 1 and before step 2
    assert steps(unheard) == [2, 3, 4]
    unheard.answered(3)
    assert steps(unheard) == []


def test_what_a_join_has_stated_is_kept_until_the_next_answer():
    unheard = UnheardApplies()
    unheard.said(applied(1), 4)
    unheard.stated(9)
    unheard.answered(9)  # asked before the join: it may have been of the syncer that died
    assert steps(unheard) == [1]
    unheard.answered(10)
    assert steps(unheard) == []


def test_it_is_bounded_and_keeps_the_newest():
    unheard = UnheardApplies()
    for step in range(MOST + 5):
        unheard.said(applied(step), 0)
    assert steps(unheard) == list(range(5, MOST + 5))


@pytest.mark.parametrize("states", [True, False])
def test_every_apply_of_a_run_is_on_its_tape_also_when_the_syncer_died_before_it_heard(
    monkeypatch, states
):
    if not states:  # what the tape would lack
        monkeypatch.setattr(UnheardApplies, "all", ())
    algorithm = {"fragments": 4, "sync_every": 4, "quorum": 2}
    timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0}
    played = Fleet(
        [Spec(steps=120, latency=0.6), Spec(steps=120, latency=1.3)],
        0, algorithm=algorithm, timeouts=timeouts,
    )  # fmt: skip
    for at_s in (33.3, 52.6):
        played.at(at_s, lambda _: played.kill_syncer(6.0))
    played.at(80.4, lambda _: played.cut("1", 30.0, silent=True))
    played.run().finish()
    rows = {(e["learner"], e["fragment"], tuple(e["version"])) for e in played.events("apply")}
    done = {
        (life.name, fragment, version)
        for life in played.lives
        for _, fragment, version, _ in life.applied
    }
    assert done and (done <= rows) == states
