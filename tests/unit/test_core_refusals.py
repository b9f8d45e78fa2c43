"""What the real core refuses, repeats, strikes and waits for, driven message by message."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dd_lightning.protocol import actions as act
from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.refusals import EVERY_S, MOST_IDS, MOST_ROWS
from tests.scripted_core import ScriptedCore

pytestmark = pytest.mark.unit


def refusal(core: ScriptedCore, session: str) -> str:
    (refused,) = core.sent(session, msg.Refused)
    return refused.reason


# ---------------------------------------------------------------- joins


def test_two_live_learners_with_one_id() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.join("0", session="other", incarnation="b", host="elsewhere", pid=7)
    said = refusal(core, "other")
    assert "'0'" in said and "host h0" in said and "pid 100" in said and "takeover=true" in said
    assert core.member("0").generation == 1 and core.member("0").live
    assert core.events("refused")[-1]["learner"] == "0"


def test_who_is_back_before_its_predecessors_close_is_seen_is_told_to_try_again() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.join("0", session="again", incarnation="b")
    (refused,) = core.sent("again", msg.Refused)
    assert not refused.fatal and refused.retry_s == core.config.timeouts.lease
    core.core.disconnected("0", core.now)
    core.join("0", session="again", incarnation="b", number=2)
    assert core.sent("again", msg.Welcome)[0].generation == 2
    core.join("0", session="other", incarnation="c", protocol=99)
    assert core.sent("other", msg.Refused)[0].fatal  # trying again would not help


def test_who_was_taken_over_is_over_though_it_may_take_over_itself() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.join("0", session="b", incarnation="b", takeover=True, host="elsewhere", pid=7)
    again = {"number": 2, "generation": 1, "takeover": True}
    core.join("0", session="0", incarnation="0-a", **again)
    (refused,) = core.sent("0", msg.Refused)
    assert refused.fatal and "host elsewhere, pid 7" in refused.reason
    core.core.disconnected("b", core.now)  # not even when the other has gone
    core.join("0", session="0", incarnation="0-a", **again)
    assert len(core.sent("0", msg.Refused)) == 2 and core.member("0").generation == 2


def test_refused_joins_leave_a_row_a_minute_with_their_count() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    for _ in range(500):
        core.join("0", session="other", incarnation="b")
    assert [e["count"] for e in core.events("refused")] == [1]
    core.advance(61.0, beats=("0", "1"), stepping=True)
    assert [e["count"] for e in core.events("refused")] == [1, 499]
    assert {e["learner"] for e in core.events("refused")} == {"0"}
    assert core.core.run.refusals == 500
    core.advance(61.0, beats=("0", "1"), stepping=True)
    assert len(core.events("refused")) == 2 and not core.core.admission.refused._unsaid


def test_refused_joins_under_ever_new_ids_are_counted_together() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    for number in range(2, 1002):
        core.join(str(number))
    rows = core.events("refused")
    assert len(rows) == MOST_IDS + 1 and len(core.core.admission.refused._unsaid) == MOST_IDS + 1
    core.core.stop("done", core.now)
    core.carry_out()
    last = core.events("refused")[-1]
    assert (last["learner"], last["count"]) == ("(others)", 1000 - MOST_IDS - 1)
    assert sum(row["count"] for row in core.events("refused")) == 1000


def test_takeover_ends_the_holder() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.step("0")
    core.join("0", session="other", incarnation="b", takeover=True)
    (welcome,) = core.sent("other", msg.Welcome)
    assert welcome.generation == 2 and welcome.data_slot == 0
    core.step("0", session="0", generation=1)
    assert core.sent("0", msg.Rejoin) == [msg.Rejoin(generation=1)]
    assert core.events("dead")[-1]["cause"] == "taken over"


def test_the_id_is_free_once_its_connection_closed_or_its_lease_ran_out() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.core.disconnected("0", core.now)
    core.join("0", session="again", incarnation="b")
    assert core.sent("again", msg.Welcome)[0].generation == 2
    core.advance(core.config.timeouts.lease + 0.1, beats=("0",))
    assert core.events("dead")[-1]["learner"] == "1"
    core.join("1", session="late", incarnation="b")
    assert core.sent("late", msg.Welcome)[0].generation == 2


def test_another_models_layout_names_the_first_difference() -> None:
    core = ScriptedCore(learners=2).started("0")
    wrong = (msg.TensorInfo("a", (2,)), msg.TensorInfo("b", (3, 3)))
    core.join("1", tensors=wrong)
    assert "its b is parameter [3, 3], the run's is parameter [2]" in refusal(core, "1")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"protocol": 99}, "protocol 99, this syncer 1"),
        ({"run_id": "another"}, "belongs to run another, this is run r"),
        ({"tensors": ()}, "it lacks a [2]"),
    ],
)
def test_a_join_that_does_not_fit(change, said) -> None:
    core = ScriptedCore(learners=2).started("0")
    core.join("1", **change)
    assert said in refusal(core, "1")
    assert "1" not in core.core.run.members


def test_beyond_max_learners() -> None:
    core = ScriptedCore(learners=2).started("0", "1")
    core.join("2")
    assert "all 2 data slots are taken (0, 1)" in refusal(core, "2")
    assert "algorithm.max_learners" in refusal(core, "2")


def test_a_repeated_join_gets_the_same_generation() -> None:
    core = ScriptedCore(learners=1).started("0")
    core.join("0", session="0", number=1)
    assert [w.generation for w in core.sent("0", msg.Welcome)] == [1, 1]
    assert len(core.events("join")) == 1


def test_a_stale_generation_gets_rejoin_and_has_no_effect() -> None:
    core = ScriptedCore(learners=1, quorum=1).started("0")
    core.join("0", session="new", number=2, continues=True, versions=((1, 0), (1, 0)))
    before = core.core.state()
    for message in (
        msg.Progress(generation=1, step=50, odometer=500),
        core.contribution("0", 1, generation=1),
        msg.Finish(generation=1, step=9, odometer=90),
        msg.Goodbye(generation=1, reason="x"),
    ):
        core.receive("0", message)
        assert core.sent("0", msg.Rejoin)[-1] == msg.Rejoin(generation=1)
    assert core.core.state() == before
    assert core.member("0").generation == 2 and core.member("0").live


def test_the_current_generation_over_its_former_session_gets_rejoin() -> None:
    core = ScriptedCore(learners=1, quorum=1).started("0")
    core.join("0", session="new", number=2, continues=True, versions=((1, 0), (1, 0)))
    core.receive("0", msg.Progress(generation=2, step=50, odometer=500))
    assert core.sent("0", msg.Rejoin)[-1] == msg.Rejoin(generation=2)
    assert core.member("0").step < 50


def test_a_message_of_an_unknown_session_gets_rejoin() -> None:
    core = ScriptedCore(learners=1).started("0")
    core.receive("nobody", msg.Progress(generation=1, step=5, odometer=50))
    assert core.sent("nobody", msg.Rejoin) == [msg.Rejoin(generation=1)]


# ---------------------------------------------------------------- contributions


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "f00"}, "layout"),
        ({"fragment": 7}, "fragment"),
        ({"epoch": 5}, "epoch"),
        ({"round": 2}, "round"),
        ({"base": (1, 9)}, "base"),
        ({"base": (2, 0)}, "base"),
        ({"tokens": 0}, "empty"),
        ({"tokens": 9999}, "counters"),
    ],
)
def test_a_contribution_is_refused_whole_and_its_learner_told(change, reason) -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    core.receive("0", replace(core.contribution("0", 1), **change), payload="x")
    (verdict,) = core.sent("0", msg.Verdict)
    assert (verdict.reason, verdict.reload) == (reason, False)
    assert core.events("contribution")[-1]["verdict"] == reason
    assert core.core.run.refusals == 1
    round_ = core.core.run.book.open[0]
    assert not round_.contributions
    assert set(round_.left) == {"1"}  # taken off the roster
    core.receive("1", core.contribution("1", 1), payload="y")
    assert [m.contributions[0].learner for m in core.merges] == ["1"]


def test_a_contribution_refused_again_and_again_leaves_a_bounded_number_of_rows() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    wrong = replace(core.contribution("0", 1), fingerprint="f00")
    for _ in range(5 * MOST_ROWS):
        core.receive("0", wrong, payload="x")
    for _ in range(2):
        core.receive("0", replace(wrong, epoch=5), payload="x")
        core.core.refuse_payload("0", wrong, "checksum", core.now)
    core.carry_out()
    rows = core.events("contribution")
    assert [e["verdict"] for e in rows] == ["layout"] * MOST_ROWS + ["checksum"] * 2
    assert core.core.run.refusals == len(core.sent("0", msg.Verdict)) == 5 * MOST_ROWS + 4
    assert not core.events("refused")
    core.advance(EVERY_S + 1.0, beats=("0", "1"), stepping=True)
    (row,) = core.events("refused")  # the count of the rest
    assert (row["learner"], row["reason"]) == ("0", "contribution: layout")
    assert row["count"] == 4 * MOST_ROWS + 2
    assert not core.core.conductor.intake.refused._minutes
    core.receive("0", wrong, payload="x")  # a new minute: in full again
    assert core.events("contribution")[-1]["verdict"] == "layout"


def test_what_was_refused_since_the_last_row_is_said_at_the_end() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    for _ in range(MOST_ROWS + 7):
        core.receive("0", replace(core.contribution("0", 1), epoch=5), payload="x")
    core.core.stop("done", core.now)
    core.carry_out()
    assert core.done is not None
    assert [(e["reason"], e["count"]) for e in core.events("refused")] == [
        ("contribution: epoch", 7)
    ]


def test_a_contribution_that_an_apply_has_overtaken_is_late_and_not_refused() -> None:
    core = ScriptedCore(learners=2, quorum=1, grace_rule="none").started("0", "1").opened(1)
    slow = core.contribution("1", 1)
    core.receive("0", core.contribution("0", 1), payload="x")  # the round closes without it
    applied = msg.Applied(
        generation=1, step=slow.step, fragment=0, version=(1, 1), odometer=slow.odometer,
        steps=0, tokens=0, tokens_before=slow.tokens,
    )  # fmt: skip
    core.receive("1", applied)
    assert core.events("lost")[-1]["cause"] == "absent"
    core.receive("1", slow, payload="late")
    assert core.events("contribution")[-1]["verdict"] == "late"
    assert core.core.run.refusals == 0 and not core.sent("1", msg.Verdict)


def test_non_finite_three_times_in_a_row_reloads() -> None:
    core = ScriptedCore(learners=2, quorum=1, grace_rule="none").started("0", "1").opened(1)
    for number in range(1, 4):
        core.opened(number)
        bad = core.contribution("0", number)
        core.core.refuse_payload("0", bad, "non-finite", core.now)
        core.carry_out()
        core.receive("1", core.contribution("1", number), payload="y")
        core.advance(0.1)
    verdicts = core.sent("0", msg.Verdict)
    assert [v.reload for v in verdicts] == [False, False, True]
    assert [a.fragment for a in core.fragments_to("0")][-2:] == [0, 1]  # Θ whole, to reload from
    assert core.member("0").rejected_in_a_row == 0


def test_the_guard_rejects_at_the_close() -> None:
    core = ScriptedCore(learners=3, quorum=3, max_norm_ratio=3.0).started("0", "1", "2").opened(1)
    core.reject = {"2": "norm 9.1 x the median"}
    for name in ("0", "1", "2"):
        core.receive(name, core.contribution(name, 1), payload=name)
    (merge,) = core.events("merge")
    assert merge["contributors"] == ["0", "1"]
    assert core.sent("2", msg.Verdict)[0].reason == "norm 9.1 x the median"
    ledger = core.core.run.ledger("2")[0]
    assert ledger["merged"] == 0 and ledger["pending"] == ledger["processed"] > 0


def test_a_snapshot_sent_again_merges_once() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    mine = core.contribution("0", 1)
    for _ in range(3):
        core.receive("0", mine, payload="x")
    core.receive("1", core.contribution("1", 1), payload="y")
    core.receive("0", mine, payload="x")
    (merge,) = core.merges
    assert [held.learner for held in merge.contributions] == ["0", "1"]
    assert core.core.run.ledger("0")[0]["merged"] == mine.tokens
    assert not core.sent("0", msg.Verdict) and core.core.run.refusals == 0


def test_a_late_contribution_is_counted_not_lost() -> None:
    core = ScriptedCore(learners=2, quorum=1, grace_rule="none").started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    core.advance(0.1)
    core.receive("1", core.contribution("1", 1), payload="y")
    assert core.events("contribution")[-1]["verdict"] == "late"
    assert core.sent("1", msg.Closed)[-1].round == (1, 1)
    assert core.core.run.ledger("1")[0]["lost"] == 0


def test_a_delta_whose_base_is_no_longer_kept_is_asked_for_as_values() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    delta = replace(core.contribution("0", 1), payload=replace(core.payload, kind="delta"))
    core.core.run.versions[0] = (1, 4)
    core.receive("0", delta, payload="x")
    again = core.sent("0", msg.Pull)[-1]
    assert (again.round, again.values) == (1, True)
    assert not core.core.run.book.open[0].contributions


# ---------------------------------------------------------------- quorum, time, end


def test_round_timeout_strikes_the_silent() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    core.advance(core.config.timeouts.round - 2, beats=("0", "1"), stepping=True)
    assert not core.merges and len(core.sent("1", msg.Pull)) > 10  # asked again and again
    core.advance(2.0, beats=("0", "1"), stepping=True)
    assert [h.learner for h in core.merges[0].contributions] == ["0"]
    assert "round 1" in core.member("1").last_error


def test_on_lost_quorum_wait() -> None:
    core = ScriptedCore(learners=2, quorum=2, on_lost_quorum="wait").started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    core.core.disconnected("1", core.now)
    core.advance(5.0, beats=("0",))
    assert core.events("round_cancelled") and not core.merges
    opened = len(core.events("round_open"))
    for _ in range(10):
        core.step("0")
    assert len(core.events("round_open")) == opened  # waits for a second learner
    core.join("1", session="1b", incarnation="b")
    core.step("1", session="1b", generation=2)
    assert len(core.events("round_open")) > opened


def test_start_timeout_starts_with_fewer_and_says_so() -> None:
    core = ScriptedCore(learners=3, quorum=3).started("0")
    for _ in range(9):
        core.step("0")
    assert not core.events("start")
    core.advance(core.config.timeouts.start + 1, beats=("0",), stepping=True)
    assert core.events("start")[0]["training"] == ["0"]
    (text,) = [w.text for w in core.warnings]
    assert "1 of min_learners=3" in text and "timeouts.start" in text


def test_budget_tokens_ends_the_run() -> None:
    core = ScriptedCore(learners=1, quorum=1, config={"budget_tokens": 12}).started("0").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    assert not core.sent("0", msg.FinishNow)
    core.opened(2)
    core.receive("0", core.contribution("0", 2), payload="x")
    (told,) = core.sent("0", msg.FinishNow)
    assert "budget.tokens=12" in told.reason


def test_a_straggler_is_told_to_finish() -> None:
    core = ScriptedCore(learners=2, quorum=1).started("0", "1")
    core.receive("0", msg.Finish(generation=1, step=9, odometer=90))
    core.advance(core.config.timeouts.finish - 1, beats=("0", "1"), stepping=True)
    assert not core.sent("1", msg.FinishNow)
    core.advance(1.1, beats=("0", "1"), stepping=True)
    assert "every other learner has finished" in core.sent("1", msg.FinishNow)[0].reason


def test_a_finished_learner_waits_no_longer_than_flush() -> None:
    core = ScriptedCore(learners=2, quorum=1).started("0", "1")
    core.step("0")
    core.receive("0", msg.Finish(generation=1, step=2, odometer=20))
    core.advance(core.config.timeouts.flush - 1, beats=("0", "1"), stepping=True)
    assert not core.sent("0", msg.Released)  # it never answered a final pull
    core.advance(1.1, beats=("0", "1"), stepping=True)
    assert core.sent("0", msg.Released)


def test_a_released_learner_that_falls_silent_has_finished() -> None:
    core = ScriptedCore(learners=2, quorum=1).started("0", "1")
    core.receive("0", msg.Finish(generation=1, step=2, odometer=20))
    core.advance(core.config.timeouts.flush + 1, beats=("0", "1"), stepping=True)
    assert core.sent("0", msg.Released)
    core.advance(core.config.timeouts.lease + 1, beats=("1",), stepping=True)
    assert not core.events("dead") and core.events("leave")[-1]["cause"] == "finished"
    assert core.core.run.finished_learners == {"0"} and not core.core.run.lost_at


def test_version_0_is_asked_for_again_and_of_the_next_when_its_source_dies() -> None:
    core = ScriptedCore(learners=2)
    core.join("0")
    core.join("1")
    assert core.sent("0", msg.Welcome)[0].send_initial
    assert not core.sent("1", msg.Welcome)[0].send_initial
    core.advance(core.config.timeouts.connect / 2 + 0.1, beats=("0", "1"))
    assert core.sent("0", msg.SendInitial) == [msg.SendInitial(generation=1)]
    core.core.disconnected("0", core.now)
    core.carry_out()
    assert core.sent("1", msg.SendInitial) == [msg.SendInitial(generation=1)]


def test_stop_lets_everyone_go_and_writes_a_checkpoint() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    core.core.stop("SIGINT", core.now)
    core.carry_out()
    assert core.sent("0", msg.Released) and core.sent("1", msg.Released)
    assert core.done == act.Done("interrupted", "SIGINT")
    assert all(row["pending"] == 0 for row in core.core.run.ledger("0"))
