"""The log's thread: a queue that never holds up the run, failures that end the dashboard only, and
what a second sitting goes on from."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dd_lightning.report import loggers
from dd_lightning.report.loggers import KINDS, check_loggers
from dd_lightning.report.points import Note, Point
from dd_lightning.report.run_log import About, RunLog
from tests.tapes import Tape

pytestmark = pytest.mark.unit

WAIT_S = 10.0  # far more than a thread needs


class Kept:
    """A writer that keeps what it gets; it opens only when told, as on a slow disk."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.keys: list[str | None] = []
        self.seen: list[Point] = []
        self.notes: list[Note] = []
        self.summary: Mapping[str, Any] | None = None
        self.closed = False

    def begin(self, about: About, key: str | None) -> str:
        self.gate.wait(WAIT_S)
        self.keys.append(key)
        return "k1"

    def points(self, points: Sequence[Point], at_s: float) -> None:
        if any(point.value == -1.0 for point in points):
            raise OSError("disk full")
        self.seen += points

    def note(self, note: Note) -> None:
        self.notes.append(note)

    def end(self, summary: Mapping[str, Any], figures: Sequence[Path]) -> None:
        self.summary = summary

    def close(self) -> None:
        self.closed = True

    def values(self, name: str) -> list[float]:
        return [point.value for point in self.seen if point.name == name]


def opened(writer: Kept, folder: Path, is_open: bool = True, **options: Any) -> RunLog:
    if is_open:
        writer.gate.set()
    return RunLog("kept", lambda: writer, About("run", folder, 0.0), **options)


def evaluation(number: int, loss: float = 1.0) -> dict[str, Any]:
    fields = {"loss": loss, "metrics": {f"m{number}": 0.0}, "tokens_merged": number}
    return {"event": "evaluation", "t_s": float(number), "file": f"{number}.ckpt", **fields}


def test_a_full_queue_drops_the_oldest_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Kept()
    slow = opened(writer, tmp_path, is_open=False, most_queued=3)
    for number in range(10):
        slow.event(evaluation(number))  # returns although nothing is written
    writer.gate.set()
    said = slow.close(WAIT_S, {"status": "finished"})
    assert [p.name for p in writer.seen if p.name != "validation_loss"] == ["m7", "m8", "m9"]
    assert slow.dropped == 7 and "too slow for 7 events" in caplog.text and said
    assert writer.summary == {"status": "finished"} and writer.closed


def test_close_is_bounded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer = Kept()
    stuck = opened(writer, tmp_path, is_open=False)
    stuck.close(0.01)
    assert "the rest is given up" in caplog.text
    writer.gate.set()
    stuck.close(WAIT_S)


def test_a_failing_logger_ends_the_dashboard_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Kept()
    failing = opened(writer, tmp_path)
    failing.event(evaluation(1, loss=-1.0))
    said = failing.close(WAIT_S)
    assert failing.failure == "OSError: disk full" and "disk full" in caplog.text
    assert said == "logger kept failed and got nothing more: OSError: disk full"
    assert writer.closed
    failing.event(evaluation(2))  # still harmless


def test_a_second_sitting_goes_on_and_writes_no_evaluation_twice(tmp_path: Path) -> None:
    first = Kept()
    log = opened(first, tmp_path)
    log.event(evaluation(1))
    assert log.close(WAIT_S) is None
    second = Kept()
    log = opened(second, tmp_path)
    log.event(evaluation(1))
    log.event(evaluation(2, loss=2.0))
    log.close(WAIT_S)
    assert (first.keys, second.keys) == ([None], ["k1"]) and log.key == "k1"
    assert second.values("validation_loss") == [2.0]


def test_a_restarted_syncer_counts_on_from_the_tape(tmp_path: Path) -> None:
    tape = Tape()
    tape.stats(2.0, "0", 10, 1000, bytes_up=500)
    tape.stats(4.0, "0", 20, 3000, 2, bytes_up=70)
    writer = Kept()
    log = opened(writer, tmp_path, past=tape.events[:1], least_interval_s=0.0)
    log.event(tape.events[1])
    log.close(WAIT_S)
    assert writer.values("tokens_per_s") == [1000.0]
    assert writer.values("bytes_up") == [570, 570]  # of the learner, of all


def test_evaluations_are_taken_from_the_evaluators_file_while_the_run_lasts(tmp_path: Path) -> None:
    rows = [{"file": "a.ckpt", "loss": 3.0, "metrics": {}, "initial": False, "final": False}]
    rows.append({**rows[0], "file": "b.ckpt", "loss": 2.0})  # the syncer has not said of this one
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    writer = Kept()
    log = opened(writer, tmp_path)
    log.event({"event": "checkpoint", "t_s": 1.0, "epoch": 1, "file": "a.ckpt", "tokens_merged": 9})
    log.close(WAIT_S)
    assert [(p.value, p.step) for p in writer.seen] == [(3.0, 9)]


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_package_names_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=rf"dd-lightning\[{KINDS[name].extra}\]"):
        check_loggers({name: {}})


def test_settings_of_loggers_are_checked_and_completed() -> None:
    assert check_loggers({"aim": {"repo": "/r"}}) == {"aim": {"repo": "/r", "experiment": None}}
    with pytest.raises(ValueError, match=r"logger is 'mlflow'; allowed: aim, tensorboard, wandb"):
        check_loggers({"mlflow": {}})
    with pytest.raises(ValueError, match=r"logger\.wandb\.entity is unknown; allowed: project"):
        check_loggers({"wandb": {"entity": "me"}})
