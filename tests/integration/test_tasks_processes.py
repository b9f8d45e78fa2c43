"""Tasks of the kit besides text (`test_launch_smoke.py`), two learners in processes: slow, a run of
40 s each on quiet processors."""

import pytest

from tests.chaos_runs import RUN_TIMEOUT_S, run_with

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# Of pictures and names there are few: the loss of a more and more confident model soon rises again.
FEW_PAIRS = ["trainer.max_steps=120", "task.module.contrast.min_temperature=0.1"]
OWN = {"vision_language": FEW_PAIRS}
METRICS = {
    "text_moe": "bits_per_byte",
    "vision": "accuracy",
    "vision_language": "recall_at_1",
}


@pytest.mark.timeout(RUN_TIMEOUT_S + 10)
@pytest.mark.parametrize("task", METRICS)
def test_a_task_learns_with_two_learners_in_processes(task, tmp_path):
    run = run_with(
        tmp_path / "run", tmp_path / "data", f"task={task}", "learners=2",
        *OWN.get(task, []),
    )  # fmt: skip
    summary = run.summary
    assert (summary["mode"], summary["task"]) == ("processes", task)
    assert summary["status"] == "finished" and len(summary["per_learner"]) == 2
    loss = summary["loss"]
    assert loss["validation"] < (0.8 if task.startswith("text") else 0.95) * loss["initial"]
    assert METRICS[task] in summary["metrics"]
    for learner in summary["per_learner"].values():
        assert learner["tokens_merged"] > 0.5 * learner["tokens"]
