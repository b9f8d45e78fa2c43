"""When a finished learner is asked for its last work: never while an answer to a question about the
same fragment may be on its way, or two contributions would hold the same tokens."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dd_lightning.protocol import messages as msg
from tests.scripted_core import TOKENS, ScriptedCore

pytestmark = pytest.mark.unit


def finals(core: ScriptedCore, learner: str = "0") -> list[tuple[int, int]]:
    """(fragment, round) of every final pull so far."""
    pulls = [pull for pull in core.sent(learner, msg.Pull) if pull.final]
    return [(pull.fragment, pull.round) for pull in pulls]


def finished() -> ScriptedCore:
    """Learner 0 finishes while round 1, of fragment 0, is open and it has been asked."""
    core = (
        ScriptedCore(learners=2, quorum=2, max_in_flight=2, sync_every=4)
        .started("0", "1")
        .opened(1)
    )
    steps = core.steps["0"]
    core.receive("0", msg.Finish(generation=1, step=steps, odometer=TOKENS * steps))
    return core


def test_not_while_a_round_is_open_in_which_it_was_asked_though_it_was_struck() -> None:
    core = finished()
    assert set(core.core.run.book.open[0].left) == {"1"}  # it left the roster with its last step
    assert finals(core) == [(1, 2)]
    core.advance(5.0, beats=("0", "1"))  # beyond the timeout of a pull
    assert {fragment for fragment, _ in finals(core)} == {1}
    core.receive("0", core.contribution("0", 1), payload="x")  # it was on its way
    core.receive("1", core.contribution("1", 1), payload="y")
    assert [held.learner for held in core.merges[0].contributions] == ["0", "1"]
    assert finals(core)[-1] == (0, 3)


def test_not_while_the_round_is_open_that_its_final_was_asked_for() -> None:
    core = finished()
    while 2 not in [event["round"] for event in core.events("round_open")]:
        core.step("1")
    assert core.core.run.book.open[1].number == 2
    core.advance(5.0, beats=("0", "1"))
    assert set(finals(core)) == {(1, 2)}  # not for round 4, though it is in no roster of round 2
    final = core.contribution("0", 2)
    core.receive("0", replace(final, final=True), payload="x")
    core.receive("1", core.contribution("1", 2), payload="y")
    (merge,) = [merge for merge in core.merges if merge.round == 2]
    assert [held.learner for held in merge.contributions] == ["0", "1"]
    assert finals(core)[-1] == (1, 4)
