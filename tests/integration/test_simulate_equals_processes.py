"""Two real processes and their simulation: the same Θ after every merge, with dropout."""

from __future__ import annotations

import pytest

from dd_lightning.protocol.tape import read_tape
from tests.chaos_runs import RUN_TIMEOUT_S, run_with

pytestmark = pytest.mark.integration

STEP_S = 0.05
STEPS, EVERY = 48, 12
SETTINGS = (
    "learners=2",
    "algorithm=diloco",  # everybody is waited for: the network decides nothing
    "algorithm.fragments=1",
    f"algorithm.sync_every={EVERY}",
    "algorithm.min_learners=all",
    f"launcher.step_floor_s={STEP_S}",
    f"simulate.step_s={STEP_S}",
    f"trainer.max_steps={STEPS}",
    "evaluate.every_s=100",
    "logger=csv",
    "task.data.batch_size=2",
    "task.data.max_bytes=300000",
    "task.module.gpt.width=32",
    "task.module.gpt.dropout=0.1",
)


def scheduled_merges(folder):
    """Digest of Θ after each merge before a learner is finishing, and what learners held: the end
    takes what comes in time."""
    rows = list(read_tape(folder / "tape.jsonl"))
    scheduled = [row for row in rows if row["event"] == "merge" and row["round"] < STEPS // EVERY]
    digests = {row["round"]: (row["contributors"], row["digest"]) for row in scheduled}
    held = {
        (row["round"], row["learner"]): (row["step"], row["digest"])
        for row in rows
        if row["event"] == "contribution" and row["round"] in digests
    }
    return digests, held


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
    merges, held = scheduled_merges(tmp_path / "real")
    assert len(merges) == STEPS // EVERY - 1
    assert (merges, held) == scheduled_merges(tmp_path / "simulated")
