"""Times of learners over several incarnations and epochs of the syncer, computed by hand."""

import pytest

from dd_lightning.report.summary import summarize
from tests.tapes import Tape

pytestmark = pytest.mark.unit


def stepped(tape, at_s, learner, step, stepping_s, generation=1, **fields):
    tape.stats(at_s, learner, step, 100 * step, generation, seconds_stepping=stepping_s, **fields)


def begun(tape, join_s, first_s, learner, incarnation, step, **fields):
    """A new process joins, and its first step begins at `first_s`."""
    tape.join(join_s, learner, incarnation=incarnation, **fields)
    tape.state(first_s + 0.1, learner, "training", step=step, first_step_started_s=first_s)


def restarted():
    """Two learners; 1 is killed at 10, the syncer at about 11 and back at 15, 1 back at 17. Learner
    2 is planned but joins at 20 and is lost at 28 for good; 7 nobody planned for."""
    tape = Tape()
    tape.start(3, [100])
    begun(tape, 1.0, 2.0, "0", "0-a", 1)
    begun(tape, 1.0, 2.5, "1", "1-a", 1)
    stepped(tape, 10.0, "0", 80, 8.0, incarnation="0-a")
    stepped(tape, 10.0, "1", 70, 7.0, incarnation="1-a")
    tape.add("dead", 10.0, learner="1", generation=1, cause="connection closed")
    tape.add("syncer_start", 15.0, epoch=2, versions=[[2, 3]])
    tape.join(15.5, "0", continues=True, cause="re-attach", incarnation="0-a")
    tape.state(15.6, "0", "training", step=134, first_step_started_s=15.2)
    begun(tape, 17.0, 18.0, "1", "1-b", 71)  # generation 1 again: the checkpoint knew of no 1
    begun(tape, 20.0, 21.0, "2", "2-a", 1)
    begun(tape, 20.0, 20.5, "7", "7-a", 1, planned=False)
    stepped(tape, 28.0, "2", 65, 6.5, incarnation="2-a")
    tape.add("dead", 28.0, learner="2", generation=1, cause="connection closed")
    tape.state(30.0, "0", "finishing", step=280)
    stepped(tape, 30.0, "0", 280, 27.5, incarnation="0-a")
    tape.state(30.0, "1", "finishing", step=190)
    stepped(tape, 30.0, "1", 190, 11.5, incarnation="1-b")
    stepped(tape, 30.0, "7", 90, 9.0, incarnation="7-a")
    tape.add("run_end", 31.0, status="finished", seconds=31.0)
    return tape.events


@pytest.fixture
def summary():
    return summarize(restarted())


def test_alive_is_from_each_incarnation_s_first_step_to_its_last_sign(summary):
    alive = {name: one["seconds_alive"] for name, one in summary["per_learner"].items()}
    assert alive["0"] == pytest.approx(30.0 - 2.0)  # one life, though the syncer was away
    assert alive["1"] == pytest.approx((10.0 - 2.5) + (30.0 - 18.0))
    assert alive["2"] == pytest.approx(28.0 - 21.0)
    assert alive["7"] == pytest.approx(30.0 - 20.5)


def test_stepping_is_summed_over_incarnations_not_over_epochs(summary):
    stepping = {name: one["seconds_stepping"] for name, one in summary["per_learner"].items()}
    assert stepping == {"0": 27.5, "1": 7.0 + 11.5, "2": 6.5, "7": 9.0}
    assert [summary["per_learner"][name]["joins"] for name in "0127"] == [2, 2, 1, 1]


def test_goodput_allocates_planned_learners_from_their_first_join_to_the_window_s_end(summary):
    # window 2..30; 0 and 1 all of it (1 though it was away), 2 from its join, though it is lost
    allocated = 28.0 + 28.0 + (30.0 - 20.0)
    assert summary["goodput"] == pytest.approx((27.5 + 18.5 + 6.5) / allocated)
    assert summary["uptime"] == pytest.approx(1.0)  # 0 stepped all the time


def test_a_time_in_which_nobody_steps_is_no_uptime():
    alone = [event for event in restarted() if event.get("learner", "1") == "1"]
    summary = summarize(alone)
    assert summary["uptime"] == pytest.approx(((10.0 - 2.5) + (30.0 - 18.0)) / (30.0 - 2.5))


def test_a_learner_killed_while_the_syncer_is_away_is_alive_until_its_last_report():
    tape = Tape()
    tape.start(1, [100])
    begun(tape, 1.0, 2.0, "0", "0-a", 1)
    stepped(tape, 9.0, "0", 70, 6.9, incarnation="0-a")
    tape.add("syncer_start", 15.0, epoch=2, versions=[[2, 3]])
    begun(tape, 16.0, 17.0, "0", "0-b", 61)
    tape.state(22.0, "0", "finishing", step=110)
    stepped(tape, 22.0, "0", 110, 4.9, incarnation="0-b")
    (learner,) = summarize(tape.events)["per_learner"].values()
    assert learner["seconds_alive"] == pytest.approx((9.0 - 2.0) + (22.0 - 17.0))
    assert learner["steps"] == 110
