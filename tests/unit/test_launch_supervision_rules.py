"""Who is started again, when, and when it is given up: by a clock of the test's own."""

import pytest

from dd_lightning.launch.supervision import (
    CRASH_LOOP,
    DONE,
    GIVE_UP,
    LEFT,
    MOST_BACK_OFF_S,
    RESTART,
    Supervisor,
)

pytestmark = pytest.mark.unit

KILLED = -9


def test_a_killed_process_is_due_after_the_pause_and_handed_out_once():
    supervisor = Supervisor(max_restarts=3, restart_after_s=1.0)
    supervisor.joined("syncer")
    verdict = supervisor.ended("syncer", KILLED, 10.0)
    assert (verdict.what, verdict.restart_s) == (RESTART, 11.0) and "SIGKILL" in verdict.why
    assert supervisor.waiting == ["syncer"] and supervisor.due(10.9) == []
    assert supervisor.due(11.0) == ["syncer"] and supervisor.due(12.0) == []
    assert supervisor.waiting == [] and supervisor.restarts("syncer") == 1


@pytest.mark.parametrize(("code", "what"), [(0, DONE), (130, LEFT), (-15, LEFT), (2, GIVE_UP)])
def test_who_ended_by_itself_or_for_a_wrong_setting_is_not_started_again(code, what):
    supervisor = Supervisor(max_restarts=3, restart_after_s=1.0)
    assert supervisor.ended("learner 0", code, 0.0).what == what
    assert supervisor.waiting == []


def test_restarts_are_counted_per_process():
    supervisor = Supervisor(max_restarts=1, restart_after_s=0.0)
    for role in ("learner 0", "learner 1"):
        supervisor.joined(role)
        assert supervisor.ended(role, KILLED, 0.0).what == RESTART
    assert supervisor.due(0.0) == ["learner 0", "learner 1"]
    supervisor.joined("learner 0")
    verdict = supervisor.ended("learner 0", KILLED, 1.0)
    assert verdict.what == GIVE_UP and "started again 1 times" in verdict.why


def test_without_restarts_the_setting_is_named():
    verdict = Supervisor(0, 1.0).ended("learner 0", 1, 0.0)
    assert verdict.what == GIVE_UP and "launcher.max_restarts is 0" in verdict.why


def ends_at_once(supervisor, codes):
    """The verdicts, and the pauses before the starts, of lives that never join."""
    now, verdicts, pauses = 0.0, [], []
    for code in codes:
        verdicts.append(supervisor.ended("learner 0", code, now))
        if verdicts[-1].restart_s is not None:
            pauses.append(verdicts[-1].restart_s - now)
            now = verdicts[-1].restart_s
            assert supervisor.due(now) == ["learner 0"]
    return [one.what for one in verdicts], pauses


def test_failed_starts_are_tried_ever_more_slowly_and_given_up():
    what, pauses = ends_at_once(Supervisor(20, 1.0), [1] * CRASH_LOOP)
    assert what == [RESTART] * (CRASH_LOOP - 1) + [GIVE_UP]
    assert pauses == [1.0, 2.0, 4.0, 8.0]


def test_ends_of_another_kind_are_no_loop():
    what, pauses = ends_at_once(Supervisor(20, 1.0), [1, KILLED] * CRASH_LOOP)
    assert set(what) == {RESTART} and set(pauses) == {1.0}


def test_who_joins_in_between_is_no_loop():
    supervisor = Supervisor(20, 1.0)
    for turn in range(10):
        supervisor.joined("learner 0")
        assert supervisor.ended("learner 0", KILLED, turn).restart_s == turn + 1.0
        supervisor.due(turn + 1.0)
    assert supervisor.restarts("learner 0") == 10


def test_the_pause_has_a_bound():
    assert Supervisor(20, 100.0).ended("learner 0", 1, 0.0).restart_s == 100.0
    _, pauses = ends_at_once(Supervisor(20, 10.0), [1] * CRASH_LOOP)
    assert pauses[-1] == MOST_BACK_OFF_S


def test_cancelled_restarts_are_not_due():
    supervisor = Supervisor(3, 1.0)
    supervisor.ended("learner 0", KILLED, 0.0)
    supervisor.cancel()
    assert supervisor.waiting == [] and supervisor.due(99.0) == []
