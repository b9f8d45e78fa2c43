"""What followed a fault is read from the tape: dead, joined, first step, in seconds after it."""

from __future__ import annotations

import json

import pytest

from dd_lightning.report.faults import Faults
from dd_lightning.report.read import report_run
from dd_lightning.report.series import Series
from dd_lightning.report.timeline import draw_timeline
from tests.tapes import Tape, small_tape

pytestmark = pytest.mark.unit


def fault(tape: Tape, t_s: float, target: str, fired: float | None = 0.0, **fields) -> None:
    fields = {"kind": "kills", "action": "kill", "planned": {"at_step": 20}, **fields}
    tape.add("fault", t_s, target=target, fired=fired, **fields)


def tape_with_faults() -> Tape:
    """Learner 1 of the small tape dies at 6.0 and comes back; the rows stand at the end."""
    tape = Tape(small_tape())
    fault(tape, 5.9, "1")
    fault(tape, 9.5, "learner 0")
    fault(tape, 11.0, "1", None, why="the run was over")
    return tape


def told(tape: Tape) -> list[str]:
    faults = Faults()
    for event in tape.events:
        faults.feed(event)
    return [one.sentence() for one in faults.list()]


def test_dead_joined_first_step() -> None:
    first, second, last = told(tape_with_faults())
    assert first == (
        "5.9 s: kill, learner 1: dead (connection closed) +0.1 s, "
        "joined (state: checkpoint) +1.1 s, first step +2.2 s"
    )
    assert second == "9.5 s: kill, learner 0: nobody was lost"
    assert last == "kill, learner 1: planned (at_step 20), did not fire: the run was over"


def test_the_next_fault_of_the_same_target_ends_what_is_counted() -> None:
    tape = tape_with_faults()
    fault(tape, 7.5, "1", action="pause")
    first, second, *_ = told(tape)
    assert first.endswith("joined (state: checkpoint) +1.1 s")
    assert second == "7.5 s: pause, learner 1: nobody was lost"


def test_the_syncer_comes_back_in_a_new_epoch() -> None:
    tape = Tape()
    tape.start(1, [10])
    fault(tape, 3.0, "syncer")
    tape.add("syncer_start", 4.0, epoch=2, versions=[[2, 0]])
    tape.merge(6.5, 1, 0, 1, ["0"], epoch=2)
    tape.merge(7.5, 2, 0, 2, ["0"], epoch=2)
    assert told(tape) == ["3.0 s: kill, syncer: restarted (epoch 2) +1.0 s, first merge +3.5 s"]


def test_a_fault_that_nobody_noticed_says_so() -> None:
    tape = Tape(small_tape())
    fault(tape, 2.5, "0", action="slow_down")
    assert told(tape) == ["2.5 s: slow_down, learner 0: nobody was lost"]
    tape.add("leave", 14.0, learner="0", generation=1, cause="SIGTERM")
    assert told(tape) == ["2.5 s: slow_down, learner 0: left (SIGTERM) +11.5 s"]


def test_the_timeline_and_the_page_show_faults_and_restarts(tmp_path) -> None:
    tape = tape_with_faults()
    fault(tape, 4.0, "syncer")
    tape.add("syncer_start", 5.0, epoch=2, versions=[[2, 0], [2, 0]])
    series = Series()
    for event in tape.events:
        series.feed(event)
    figure = draw_timeline(series)
    labels = {label.get_text() for label in figure.axes[0].get_legend().get_texts()}
    assert {"fault", "syncer restarts"} <= labels
    lines = "".join(json.dumps(event) + "\n" for event in tape.events)
    (tmp_path / "tape.jsonl").write_text(lines)
    page = report_run(tmp_path).read_text()
    assert "Faults and what followed" in page
    assert "joined (state: checkpoint) +1.1 s" in page
