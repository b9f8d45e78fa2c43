"""Every figure of `summary.json` against values computed by hand from `tapes.small_tape`."""

from __future__ import annotations

import json

import pytest

from dd_lightning.report.summary import summarize, write_summary
from tests.fleet_tapes import fleet_tape
from tests.tapes import DIGEST, Tape, assert_valid, small_tape

pytestmark = pytest.mark.unit


@pytest.fixture
def summary() -> dict:
    found = summarize(small_tape())
    assert_valid(found)
    return found


def test_run_as_a_whole(summary: dict) -> None:
    facts = ("status", "mode", "task", "seconds", "learners", "seed", "rounds")
    assert [summary[name] for name in facts] == ["finished", "processes", "text", 15.0, 2, 7, 3]
    assert summary["parameters_sha256"] == DIGEST
    assert summary["versions"] == {"torch": "2.14.1"}


def test_rounds_and_contributors(summary: dict) -> None:
    assert summary["merges_per_fragment"] == {"min": 1, "mean": 1.5, "max": 2}
    assert summary["contributors"] == {"min": 1, "mean": 4 / 3, "max": 2}
    assert summary["effective_h"] == ((80 + 50) / 2) / 1.5


def test_rounds_share_leaves_out_the_round_in_which_the_learner_died(summary: dict) -> None:
    assert summary["per_learner"]["0"]["rounds_share"] == 1.0
    # 1 of rounds 1 and 3: it died while round 2 was open, and came late to round 3
    assert summary["per_learner"]["1"]["rounds_share"] == 1 / 2


def test_times(summary: dict) -> None:
    """Window 2.0 (first step of 0 began) to 12.0 (last step of 1)."""
    zero, one = summary["per_learner"]["0"], summary["per_learner"]["1"]
    assert zero["seconds_stepping"] == 7.5
    assert one["seconds_stepping"] == pytest.approx(3.0 + 3.8)
    assert zero["seconds_alive"] == pytest.approx(12.0 - 2.0)  # waits for its last merges
    assert one["seconds_alive"] == pytest.approx((6.0 - 3.0) + (12.0 - 8.0))
    # 0 is allocated 2..10 (its own last step), 1 from 2 (it joined at 1.5) to 12
    assert summary["goodput"] == pytest.approx((7.5 + 6.8) / (8.0 + 10.0))
    assert summary["uptime"] == pytest.approx(1.0)  # 2..10 by 0, 8..12 by 1


def test_learners_steps_joins_and_measurements(summary: dict) -> None:
    zero, one = summary["per_learner"]["0"], summary["per_learner"]["1"]
    assert (zero["steps"], one["steps"]) == (80, 50)
    assert (zero["joins"], one["joins"]) == (1, 2)
    assert (one["strategy"], one["ranks"]) == ("SingleDeviceStrategy", 1)
    assert (one["step_seconds_p50"], one["step_seconds_p99"]) == (0.1, 0.2)
    assert (one["rtt_ms_p50"], one["rho"]) == (10.0, None)


def test_bytes_sum_over_connections_not_over_reports(summary: dict) -> None:
    assert summary["per_learner"]["0"]["wire_bytes"] == {"up": 9000, "down": 4500}
    assert summary["per_learner"]["1"]["wire_bytes"] == {"up": 3000, "down": 1700}
    assert summary["bytes"] == {"up": 12000, "down": 6200}


def test_tokens_weigh_fragments_by_elements(summary: dict) -> None:
    zero, one = summary["per_learner"]["0"], summary["per_learner"]["1"]
    assert (zero["tokens"], zero["tokens_merged"]) == (8000, (300 * 3000 + 100 * 2000) / 400)
    assert (one["tokens_lost"], one["tokens_pending"]) == ((300 * 1400 + 100 * 2000) / 400, 4000)
    assert one["ledger"][0] == {"processed": 6000, "merged": 600, "lost": 1400, "pending": 4000}
    merged = 300 * (3000 + 600) + 100 * 2000
    assert summary["tokens_merged_share"] == merged / (400 * (8000 + 6000))


def test_losses(summary: dict) -> None:
    assert summary["loss"] == {"initial": 5.5, "validation": 3.25, "train_last": 1.25}
    assert summary["metrics"] == {"bits_per_byte": 1.5}


def test_account_of_a_cut_tape_comes_from_contributions_losses_and_odometers() -> None:
    events = [event for event in small_tape() if event["event"] != "ledger"]
    one = summarize(events)["per_learner"]["1"]
    assert one["ledger"] == [
        {"processed": 6000, "merged": 600, "lost": 1400, "pending": 4000},
        {"processed": 6000, "merged": 0, "lost": 2000, "pending": 4000},
    ]


def test_merges_undone_by_a_restart_no_longer_count_as_merged() -> None:
    tape = Tape()
    tape.start(1, [10])
    tape.join(1.0, "0")
    for number in (1, 2):
        tape.round_open(1.0 + number, number, 0, [["0", 1]])
        tape.contribution(1.2 + number, number, 0, "0", 500)
        tape.merge(1.3 + number, number, 0, number, ["0"])
    tape.stats(4.0, "0", 20, 1200)
    before = summarize(tape.events)
    tape.add("syncer_start", 5.0, epoch=2, versions=[[1, 1]])
    tape.lost(5.5, "0", 0, 300, "rollback")
    after = summarize(tape.events)
    assert before["per_learner"]["0"]["tokens_merged"] == 1000
    assert after["per_learner"]["0"]["ledger"] == [
        {"processed": 1200, "merged": 500, "lost": 300, "pending": 400}
    ]
    assert after["rounds"] == 2  # merges on the tape


def test_a_resumed_run_has_not_ended() -> None:
    tape = Tape(small_tape())
    tape.add("syncer_start", 16.0, epoch=2, versions=[[1, 2], [1, 1]])
    summary = summarize(tape.events)
    assert (summary["status"], summary["parameters_sha256"]) == ("failed", None)


def test_late_joiner_is_allocated_from_its_join_and_a_missing_one_from_the_start() -> None:
    tape = Tape()
    tape.start(3, [10])
    for learner, joined in (("0", 1.0), ("1", 7.0)):
        tape.join(joined, learner)
        tape.state(joined + 1.1, learner, "training", step=1, first_step_started_s=joined + 1)
    tape.stats(12.0, "0", 100, 100, seconds_stepping=8.0)
    tape.stats(12.0, "1", 40, 40, seconds_stepping=4.0)
    # window 2..12; learner 2 of the plan never came
    assert summarize(tape.events)["goodput"] == pytest.approx(12.0 / (10.0 + 5.0 + 10.0))


def test_uptime_counts_gaps_between_incarnations() -> None:
    tape = Tape()
    tape.start(1, [10])
    tape.join(0.5, "0")
    tape.state(1.1, "0", "training", step=1, first_step_started_s=1.0)
    tape.stats(4.0, "0", 30, 30)
    tape.stats(9.0, "0", 30, 30)  # a heartbeat is no step
    tape.join(9.5, "0", 2)
    tape.state(10.1, "0", "training", 2, step=31, first_step_started_s=10.0)
    tape.stats(11.0, "0", 40, 10, 2)
    summary = summarize(tape.events)
    assert summary["uptime"] == pytest.approx((3.0 + 1.0) / 10.0)
    assert summary["per_learner"]["0"]["seconds_alive"] == pytest.approx(8.0 + 1.0)


def test_a_reattach_continues_the_incarnation() -> None:
    tape = Tape()
    tape.start(1, [10])
    tape.join(0.5, "0")
    tape.state(1.1, "0", "training", step=1, first_step_started_s=1.0)
    tape.stats(4.0, "0", 30, 300, seconds_stepping=3.0, bytes_up=10, bytes_down=1)
    tape.join(5.0, "0", 2, continues=True, incarnation="0-1")
    tape.stats(
        6.0, "0", 50, 500, 2, incarnation="0-1", seconds_stepping=5.0, bytes_up=7, bytes_down=2
    )
    summary = summarize(tape.events)
    learner = summary["per_learner"]["0"]
    assert (learner["joins"], learner["tokens"], learner["seconds_stepping"]) == (2, 500, 5.0)
    assert learner["wire_bytes"] == {"up": 17, "down": 3}
    assert (summary["uptime"], summary["goodput"]) == (1.0, 1.0)


def test_empty_tape_and_no_learner_give_valid_summaries() -> None:
    tape = Tape()
    assert_valid(summarize([]))
    tape.start(4, [10, 10])
    summary = summarize(tape.events, status="interrupted")
    assert_valid(summary)
    assert (summary["status"], summary["learners"], summary["per_learner"]) == (
        "interrupted",
        4,
        {},
    )
    assert summary["merges_per_fragment"] == {"min": 0, "mean": 0, "max": 0}
    assert summary["effective_h"] is None


def test_numbers_that_are_not_finite_become_null() -> None:
    tape = Tape(small_tape())
    tape.stats(16.0, "0", 80, 8000, loss=float("nan"), rtt_ms_p50=float("inf"))
    metrics = {"recall_at_1": float("nan"), "retrieval_candidates": 64}
    tape.evaluation(17.0, float("nan"), final=True, metrics=metrics)
    summary = summarize(tape.events)
    assert_valid(summary)
    assert summary["loss"]["validation"] is None
    assert summary["metrics"] == {"recall_at_1": None, "retrieval_candidates": 64}


def test_evaluations_may_stand_beside_the_tape() -> None:
    events = [event for event in small_tape() if event["event"] != "evaluation"]
    beside = [{"file": "x", "loss": 3.0, "metrics": {}, "final": True}]
    assert summarize(events)["loss"]["validation"] is None
    assert summarize(events, evaluations=beside)["loss"]["validation"] == 3.0


def test_unknown_status_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'done'.*finished \| failed \| interrupted"):
        summarize([], status="done")


def test_fleet_ledger_equals_its_account_from_events() -> None:
    """The tape's own ledger and the one made from its events agree on every fragment."""
    events = fleet_tape(learners=3, rounds=60)
    with_ledger = summarize(events)
    without = summarize(event for event in events if event["event"] != "ledger")
    assert with_ledger["per_learner"] == without["per_learner"]


def test_write_summary_is_whole_or_absent(tmp_path, summary: dict) -> None:
    path = write_summary(tmp_path, summary)
    assert json.loads(path.read_text()) == summary
    with pytest.raises(ValueError, match="JSON"):
        write_summary(tmp_path, {"loss": float("nan")})
    assert json.loads(path.read_text()) == summary
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
