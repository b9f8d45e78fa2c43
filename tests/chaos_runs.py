"""A run of the launcher with a fault in it, and what its tape and summary must show afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jsonschema

from dd_lightning.protocol.tape import read_tape

ROOT = Path(__file__).parents[1]
SCHEMA = json.loads((ROOT / "tests" / "schema" / "summary.schema.json").read_text())
COMMAND = [sys.executable, "-m", "dd_lightning.cli", "launch", "experiment=smoke"]
RUN_TIMEOUT_S = 400  # a quarter of it on two cores of its own


@dataclass(frozen=True)
class FaultyRun:
    """A finished run in its folder, read once."""

    folder: Path
    printed: str

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return list(read_tape(self.folder / "tape.jsonl"))

    @cached_property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Events of a kind with these values, in the tape's order."""
        return [
            event
            for event in self.events
            if event["event"] == kind and all(event.get(k) == v for k, v in fields.items())
        ]

    def fired(self) -> list[dict[str, Any]]:
        """Faults that did."""
        return [fault for fault in self.of("fault") if fault["fired"] is not None]

    def verdicts(self, learner: str) -> list[str]:
        """Of this learner's contributions, in the order they arrived."""
        found = self.of("contribution", learner=learner)
        return [one["verdict"] for one in sorted(found, key=lambda one: one["t_s"])]


def run_with(folder: Path, data: Path, *overrides: str) -> FaultyRun:
    """Run `experiment=smoke` with these overrides; it must end well."""
    done = subprocess.run(
        [*COMMAND, *overrides, f"hydra.run.dir={folder}"],
        capture_output=True,
        text=True,
        env=os.environ | {"DD_DATA": str(data), "OMP_NUM_THREADS": "1"},
        timeout=RUN_TIMEOUT_S,
    )
    logs = "".join(f"\n{log}:\n{log.read_text()[-1500:]}" for log in folder.rglob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return FaultyRun(folder, done.stdout)


def assert_accounted(run: FaultyRun, choice: str) -> None:
    """What holds after any fault, however short the run: it fired, each token is accounted for."""
    summary, faults = run.summary, run.fired()
    jsonschema.validate(summary, SCHEMA)
    assert summary["status"] == "finished" and run.of("run_end")[-1]["status"] == "finished"
    assert faults and {fault["kind"] for fault in faults} == {choice}
    first_checkpoint_s = next(e["t_s"] for e in run.of("checkpoint") if e["tokens_merged"])
    assert all(fault["fired"] >= first_checkpoint_s for fault in faults)
    for learner in summary["per_learner"].values():
        for row in learner["ledger"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
        assert any(row["merged"] for row in learner["ledger"])


def assert_survived(run: FaultyRun, choice: str) -> None:
    """As `assert_accounted`, and all learned on."""
    assert_accounted(run, choice)
    assert run.summary["loss"]["validation"] < 0.8 * run.summary["loss"]["initial"]
