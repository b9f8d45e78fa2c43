"""What a learner can make the syncer hold, and what is said again until it is heard."""

import pytest
from msgspec.structs import replace

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import messages as msg
from tests.fleet import Fleet, Spec
from tests.scripted_core import ScriptedCore

pytestmark = pytest.mark.unit


def running(**spec) -> Fleet:
    return Fleet([Spec(steps=60, **spec)], algorithm={"fragments": 2, "sync_every": 4})


def test_a_contribution_for_a_far_round_is_refused_not_kept():
    fleet = running().run(until=20.0)
    core, life = fleet.core, fleet.current["0"]
    seen = [a.contributions[0].message for _, a in fleet.merge_log][-1]
    far = replace(
        seen, round=seen.round + 200, generation=1, unasked=True, odometer=seen.odometer + 10,
        tokens=10, steps=1,
    )  # fmt: skip
    core.receive(life.session, far, fleet.now)
    said = [a.message for a in core.take() if isinstance(a, act.Send)]
    assert [m.reason for m in said if isinstance(m, msg.Verdict)] == ["round"]
    assert core.run.early == {}


def test_finish_now_is_said_until_it_is_heard():
    fleet = running()
    told = []
    original = fleet.to_learner

    def lose_the_first(session, message, payload, now):
        if isinstance(message, msg.FinishNow):
            told.append(now)
            if len(told) == 1:
                return
        original(session, message, payload, now)

    fleet.to_learner = lose_the_first
    fleet.at(15.0, lambda now: fleet.core.endgame.tell(fleet.core.run.live, "enough"))
    fleet.run()
    assert len(told) >= 2
    assert fleet.current["0"].ledger.step < 60


def test_a_round_in_which_all_were_rejected_is_no_merge():
    fleet = running()
    rejected = []

    def reject_once(action):
        if not rejected:
            rejected.append(action)
            reasons = tuple((held.learner, "norm") for held in action.contributions)
            fleet.core.merged(action, act.MergeResult("d", None, 0.0, rejected=reasons), fleet.now)
        else:
            Fleet.merge(fleet, action)

    fleet.merge = reject_once
    fleet.run()
    (first,) = rejected
    assert first.round not in [event["round"] for event in fleet.events("merge")]
    assert first.round in [event["round"] for event in fleet.events("round_cancelled")]
    assert all(event["contributors"] for event in fleet.events("merge"))
    fleet.finish()


def test_a_learner_that_is_past_a_round_is_not_waited_for() -> None:
    """`wait: overlap`: with a snapshot of a later round it answers no pull of an earlier one."""
    core = ScriptedCore(2, quorum="all", wait="overlap", overlap=0).started("0", "1").opened(1)
    ahead = replace(core.contribution("1", 3), unasked=True)
    core.receive("1", ahead, payload="later")
    core.receive("0", core.contribution("0", 1), payload="now")
    assert [(merge.round, [c.learner for c in merge.contributions]) for merge in core.merges] == [
        (1, ["0"])
    ]


def test_nor_is_one_that_was_past_it_before_it_opened() -> None:
    """One that joined late hands in its own next round first, while the first one is not open yet:
    the round that it waits for must not wait for it."""
    core = ScriptedCore(2, quorum="all", wait="overlap", overlap=0).started("0", "1")
    for number in (1, 2):
        core.opened(number)
        for learner in ("0", "1"):
            core.receive(learner, core.contribution(learner, number), payload="now")
    assert 3 not in [event["round"] for event in core.events("round_open")]
    core.step("1")
    core.receive("1", replace(core.contribution("1", 5), unasked=True), payload="later")
    core.opened(3)
    core.receive("0", core.contribution("0", 3), payload="now")
    (third,) = [merge for merge in core.merges if merge.round == 3]
    assert [one.learner for one in third.contributions] == ["0"]
