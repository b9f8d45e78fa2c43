"""A real Aim repository gets a run from its tape, and the rest of it after a change of process."""

from __future__ import annotations

from pathlib import Path

import pytest

from dd_lightning.report.aim_log import AimRunLog
from tests.fleet_tapes import fleet_tape

pytestmark = pytest.mark.integration


def test_a_run_is_written_in_two_sittings(tmp_path: Path) -> None:
    aim = pytest.importorskip("aim")
    events = fleet_tape(2, 30)
    first = AimRunLog(tmp_path, "experiment", "run", {"seed": 7}, least_interval_s=0.0)
    for event in events:
        if event["event"] != "evaluation":
            first.event(event)
    run_hash = first.close(timeout_s=60.0)
    assert first.failure is None and first.dropped == 0
    second = AimRunLog(tmp_path, "experiment", "run", run_hash=run_hash)
    for event in events:
        if event["event"] == "evaluation":
            second.event(event)
    assert second.close({"status": "finished"}, timeout_s=60.0) == run_hash
    assert second.failure is None

    repo = aim.Repo(str(tmp_path))
    repo._recreate_index()  # Aim shows a run only once it is indexed (`aim up` does it)
    run = repo.get_run(run_hash)
    found = {
        (metric.name, *metric.context.to_dict().values()): len(metric.values.sparse_numpy()[0])
        for metric in run.metrics()
    }
    assert found["contributors",] == 30
    assert found["train_loss", "1"] == 16
    assert found["validation_loss", "validation"] == 4
    assert run["config"] == {"seed": 7} and run["summary"] == {"status": "finished"}
