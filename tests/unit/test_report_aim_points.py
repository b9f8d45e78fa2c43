"""What goes to Aim: points and their thinning, and a queue that never holds up the run."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from dd_lightning.report import aim_log
from dd_lightning.report.aim_log import AimRunLog
from dd_lightning.report.aim_points import Point, Points
from tests.fleet_tapes import fleet_tape
from tests.tapes import Tape, small_tape

pytestmark = pytest.mark.unit


def points_of(events: list[dict], least_interval_s: float = 0.0) -> list[Point]:
    points = Points(least_interval_s)
    return [point for event in events for point in points.of(event)]


def values(points: list[Point], name: str, **context: Any) -> list[float]:
    return [p.value for p in points if p.name == name and p.context == context]


def test_points_of_the_small_tape() -> None:
    points = points_of(small_tape())
    assert values(points, "contributors") == [2, 1, 1]
    assert values(points, "train_loss", learner="0") == [2.0, 1.0]
    assert values(points, "tokens_per_s", learner="0") == [(8000 - 3000) / 7.0]
    assert values(points, "outer_norm", fragment=0) == [0.5, 0.5]
    assert values(points, "staleness", learner="1") == [0]  # the late one has none
    assert values(points, "validation_loss", subset="validation") == [5.5, 4.0, 3.25]
    assert values(points, "bytes_up")[-1] == 9000 + 1000 + 2000


def test_a_new_incarnation_has_no_negative_rate() -> None:
    assert all(p.value >= 0 for p in points_of(fleet_tape(2, 40)) if p.name == "tokens_per_s")


def test_series_are_thinned_by_the_runs_time_but_evaluations_are_not() -> None:
    events = fleet_tape(2, 100)
    seconds = max(event["t_s"] for event in events)
    thin = points_of(events, least_interval_s=10.0)
    counts = Counter((p.name, *p.context.items()) for p in thin if p.name != "validation_loss")
    del counts[("bits_per_byte", ("subset", "validation"))]
    assert max(counts.values()) <= seconds / 10.0 + 1
    assert len(values(thin, "validation_loss", subset="validation")) == 11


def test_null_and_not_finite_values_make_no_point() -> None:
    tape = Tape()
    tape.stats(2.0, "0", 10, 100, loss=None, rtt_ms_p50=float("nan"))
    assert {p.name for p in points_of(tape.events)} == {"step_seconds", "bytes_up", "bytes_down"}


class Blocked(AimRunLog):
    """Its Aim opens only when told, as a slow disk would."""

    def __init__(self, **options: Any) -> None:
        self.gate = threading.Event()
        self.run = FakeRun()
        super().__init__("nowhere", "experiment", "run", **options)

    def _open(self) -> Any:
        self.gate.wait(10.0)
        return self.run


class FakeRun(dict):
    """Stands in for aim.Run: keeps what was tracked."""

    def __init__(self) -> None:
        self.tracked: list[str] = []
        self.closed = False

    def track(self, value: float, name: str, step: int, context: dict[str, Any]) -> None:
        if value == -1.0:
            raise OSError("disk full")
        self.tracked.append(name)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def aim_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aim_log.importlib.util, "find_spec", lambda name: object())


def evaluation(number: int, loss: float = 1.0) -> dict[str, Any]:
    fields = {"loss": loss, "metrics": {f"m{number}": 0.0}, "tokens_merged": number}
    return {"event": "evaluation", "t_s": float(number), "file": "x", **fields}


def test_a_full_queue_drops_the_oldest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    slow = Blocked(most_queued=3)
    for number in range(10):
        slow.event(evaluation(number))  # returns although nothing is written
    slow.gate.set()
    slow.close({"status": "finished"}, timeout_s=10.0)
    assert [name for name in slow.run.tracked if name != "validation_loss"] == ["m7", "m8", "m9"]
    assert slow.dropped == 7 and "7 events were not written to Aim" in caplog.text
    assert slow.run["summary"] == {"status": "finished"} and slow.run.closed


def test_close_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    stuck = Blocked()
    stuck.close(timeout_s=0.01)
    assert "the rest is given up" in caplog.text
    stuck.gate.set()


def test_a_failing_aim_ends_the_dashboard_only(caplog: pytest.LogCaptureFixture) -> None:
    failing = Blocked()
    failing.gate.set()
    failing.event(evaluation(1, loss=-1.0))
    failing.close(timeout_s=10.0)
    assert failing.failure == "OSError: disk full" and "disk full" in caplog.text
    assert failing.run.closed
    failing.event(evaluation(2))  # still harmless


def test_missing_aim_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aim_log.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"dd-lightning\[aim\]"):
        AimRunLog("nowhere", "experiment", "run")
