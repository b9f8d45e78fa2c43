"""A learner that was cut off and lives re-attaches: it is asked at once what its rounds lack."""

from __future__ import annotations

import pytest

from dd_lightning.protocol.messages import HELD, Progress, Pull, Rejoin
from tests.scripted_core import TOKENS, ScriptedCore

pytestmark = pytest.mark.unit


@pytest.fixture
def core() -> ScriptedCore:
    """Round 1 is open and waits for both."""
    return ScriptedCore(2, quorum=2).started("0", "1").opened(1)


def reattach(core: ScriptedCore, learner: str = "0") -> None:
    """Over a new connection, while the syncer takes the old one for alive."""
    step = core.steps[learner]
    core.join(
        learner, session="new", number=2, continues=True, generation=1, step=step,
        versions=((1, 0), (1, 0)), odometer=TOKENS * step,
        pending=((step, TOKENS * step),) * 2,
    )  # fmt: skip


def test_the_pull_of_an_open_round_comes_with_the_welcome(core) -> None:
    assert [pull.generation for pull in core.sent("0", Pull)] == [1]
    reattach(core)
    (pull,) = core.sent("new", Pull)  # at the same instant: no pull timeout has passed
    assert (pull.round, pull.generation, pull.base) == (1, 2, HELD)
    core.receive("new", core.contribution("0", 1, generation=2), payload="x")
    core.receive("1", core.contribution("1", 1), payload="x")
    (merge,) = core.merges
    assert [(held.learner, held.generation) for held in merge.contributions] == [("0", 2), ("1", 1)]


def test_it_is_not_asked_twice_within_a_pull_timeout(core) -> None:
    reattach(core)
    core.advance(3.5, beats=("0", "1"))  # the timeout is four median steps, of 1 s each
    assert len(core.sent("new", Pull)) == 1
    core.advance(1.0, beats=("0", "1"))
    assert len(core.sent("new", Pull)) == 2


def test_what_it_has_handed_in_is_not_asked_again(core) -> None:
    core.receive("0", core.contribution("0", 1), payload="x")
    reattach(core)
    assert core.sent("new", Pull) == []


def test_late_bytes_of_the_old_connection_do_nothing(core) -> None:
    late = core.contribution("0", 1)
    reattach(core)
    before = len(core.actions)
    core.receive("0", late, payload="x")
    core.receive("0", Progress(generation=1, step=99, odometer=990))
    said = [type(message) for message in core.sent("0", Rejoin)]
    assert said == [Rejoin, Rejoin] and len(core.actions) == before + 2
    assert core.member("0").step < 99 and core.merges == []


def contribute(core: ScriptedCore, learner: str, number: int) -> None:
    """Make a step and hand in; a grace window of nothing is over at once."""
    core.step(learner, core.member(learner).session)
    core.receive(core.member(learner).session, core.contribution(learner, number), payload="x")
    core.core.tick(core.now)
    core.carry_out()


def test_a_round_opened_before_it_came_back_does_not_overwrite_what_it_did_meanwhile() -> None:
    core = ScriptedCore(3, quorum=1, min_learners=3, grace_rule="none").started("0", "1", "2")
    core.opened(1)
    first = core.core.run.versions[0]
    contribute(core, "1", 1)  # closes it: version 1 of fragment 0
    assert core.core.run.versions[0] > first
    core.opened(2)
    contribute(core, "1", 2)
    core.opened(3)  # of fragment 0 again, with learner 0 in its roster, which is cut off by now
    step = core.steps["0"]
    core.join(
        "0", session="new", number=2, continues=True, generation=1, step=step,
        versions=((1, 0), (1, 0)), odometer=TOKENS * step,
        pending=((step, TOKENS * step),) * 2,
    )  # fmt: skip
    contribute(core, "1", 3)  # closes round 3 without it
    assert core.core.run.versions[0] == (1, 2)
    sent = [action for action in core.fragments_to("new") if action.fragment == 0]
    assert sent == []
    core.opened(4)
    contribute(core, "1", 4)
    core.opened(5)
    contribute(core, "0", 5)
    assert [action for action in core.fragments_to("new") if action.fragment == 0] != []
    assert core.member("0").account.lost[0] == 0
