"""How soon a learner that is gone is known to be, and that rounds waiting for it then go on."""

from __future__ import annotations

import pytest

from dd_lightning.protocol import messages as msg
from tests.scripted_core import ScriptedCore

pytestmark = pytest.mark.unit


def waiting_for_one(**algorithm) -> ScriptedCore:
    """Round 1 has the contribution of learner 0 and waits for that of learner 1."""
    core = ScriptedCore(learners=2, quorum=2, **algorithm).started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    assert not core.merges
    return core


def test_a_closed_connection_is_known_at_once() -> None:
    core = waiting_for_one()
    core.core.disconnected("1", core.now)
    core.carry_out()
    assert core.events("dead")[-1]["cause"] == "connection closed"
    assert [held.learner for held in core.merges[0].contributions] == ["0"]


def test_a_stopped_learner_leaves_the_roster_when_it_stalls_and_is_lost_with_its_lease() -> None:
    """SIGSTOP: no reports, the connection stands."""
    core = waiting_for_one()
    stopped_s = core.member("1").reported_s
    core.advance(5.0, beats=("0",), stepping=True)  # max(10 steps, 5 s) of 1 s are 10 s
    assert core.member("1").state == "training" and not core.merges
    lease = core.config.timeouts.lease
    core.advance(stopped_s + lease - core.now - 0.1, beats=("0",), stepping=True)
    assert core.member("1").live
    core.advance(0.1, beats=("0",), stepping=True)
    assert core.member("1").state == "lost" and core.merges


def test_a_learner_of_short_steps_that_stops_is_off_the_roster_after_5_s() -> None:
    core = waiting_for_one()
    for _ in range(40):  # its steps become short
        for learner in ("0", "1"):
            core.steps[learner] += 1
            step = core.steps[learner]
            report = msg.Progress(generation=1, step=step, odometer=10 * step, step_seconds=(0.1,))
            core.receive(learner, report)
        core.now += 0.1
    assert not core.merges
    core.advance(4.5, beats=("0",), stepping=True)
    assert not core.merges
    core.advance(0.5, beats=("0",), stepping=True)
    assert core.member("1").state == "paused" and len(core.merges) == 1


def test_a_deadline_asks_for_the_tick_that_sees_it() -> None:
    core = waiting_for_one()
    lapses_s = core.member("1").reported_s + core.config.timeouts.lease
    deadline = core.core.next_deadline(core.now)
    while deadline is not None and deadline < lapses_s:
        core.now = deadline
        core.step("0") if core.now + 1.0 < lapses_s else core.core.tick(core.now)
        core.carry_out()
        deadline = core.core.next_deadline(core.now)
    assert deadline == lapses_s
