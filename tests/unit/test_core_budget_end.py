"""Who is told to finish once the budget is merged: everyone, a joiner after its first step."""

import pytest

from dd_lightning.protocol import messages as msg
from tests.scripted_core import ScriptedCore

pytestmark = pytest.mark.unit


def budget_met_with_a_joiner():
    """Learner 0 has met the budget while learner 1, whose process was started again, joins."""
    core = ScriptedCore(2, {"budget_tokens": 10, "timeouts": {"finish": 20.0}}, quorum=1)
    core.started("0", "1")
    core.core.disconnected("1", core.now)
    core.join("1", session="1b", incarnation="1-b")
    core.steps["1"] = 0
    for number in range(1, 7):
        if core.core.run.tokens_merged >= 10:
            break
        core.opened(number)
        core.receive("0", core.contribution("0", number), payload=f"x{number}")
        core.advance(5.0, beats=("0", "1"))
    assert core.core.run.tokens_merged >= 10
    assert len(core.sent("0", msg.FinishNow)) >= 1
    return core


def test_a_joiner_is_told_after_its_first_step():
    core = budget_met_with_a_joiner()
    assert core.member("1").state == "joining"
    assert core.sent("1b", msg.FinishNow) == []
    core.step("1", session="1b")
    assert [one.reason for one in core.sent("1b", msg.FinishNow)] == ["budget.tokens=10 merged"]


def test_a_joiner_that_makes_no_step_is_told_in_the_end():
    core = budget_met_with_a_joiner()
    core.advance(21.0, beats=("0", "1"))
    assert len(core.sent("1b", msg.FinishNow)) >= 1
