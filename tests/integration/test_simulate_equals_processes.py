"""Two real processes and their simulation: the same Θ after every merge, with dropout."""

from __future__ import annotations

import pytest

from dd_lightning.protocol.tape import read_tape
from tests.chaos_runs import RUN_TIMEOUT_S, run_with

pytestmark = pytest.mark.integration

STEP_S = 0.05
SETTINGS = (
    "learners=2",
    "algorithm=diloco",  # everybody is waited for: the network decides nothing
    "algorithm.fragments=1",
    "algorithm.sync_every=12",
    "algorithm.min_learners=all",
    f"launcher.step_floor_s={STEP_S}",
    f"simulate.step_s={STEP_S}",
    "trainer.max_steps=48",
    "evaluate.every_s=100",
    "logger=csv",
    "task.data.batch_size=2",
    "task.data.max_bytes=300000",
    "task.module.gpt.width=32",
    "task.module.gpt.dropout=0.1",
)


def merges_of_all(folder):
    """Digest of Θ after each merge that had both learners in it, and what they held."""
    rows = list(read_tape(folder / "tape.jsonl"))
    both = {
        r["round"]: r["digest"]
        for r in rows
        if r["event"] == "merge" and len(r["contributors"]) == 2
    }
    held = {
        (row["round"], row["learner"]): (row["step"], row["digest"])
        for row in rows
        if row["event"] == "contribution" and row["round"] in both
    }
    return both, held


@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_run_of_processes_is_its_simulation_bit_for_bit(tmp_path):
    real = run_with(tmp_path / "real", tmp_path / "data", *SETTINGS)
    # a process is up when it is up: the simulated learner joins at the same step of the other
    late = {j["learner"]: STEP_S * (j["clock"] + 0.4) for j in real.of("join") if j["clock"]}
    joins = ", ".join(f"{learner}: {at_s}" for learner, at_s in late.items())
    run_with(
        tmp_path / "simulated",
        tmp_path / "data",
        *SETTINGS,
        "mode=simulate",
        f"simulate.joins={{{joins}}}",
    )
    merges, held = merges_of_all(tmp_path / "real")
    assert len(merges) >= 2
    assert (merges, held) == merges_of_all(tmp_path / "simulated")
