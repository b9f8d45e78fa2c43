"""What the launcher adds to a tape once the syncer's process is gone."""

import json

import pytest

from dd_lightning.launch.finish import finish_run
from dd_lightning.protocol.tape import TapeWriter, read_tape

pytestmark = pytest.mark.unit

DIGEST = "a" * 64


def write_tape(folder, end=None):
    tape = TapeWriter(folder / "tape.jsonl")
    config = {"mode": "processes", "learners": 2, "task": {"name": "text"}}
    tape.write("run", 0.0, schema=1, config=config, seed=1, versions={"torch": "2"})
    tape.write("checkpoint", 3.0, epoch=1, file="step-1-0.ckpt", tokens_merged=0)
    tape.write("checkpoint", 8.0, epoch=1, file="step-1-9.ckpt", tokens_merged=640)
    if end is not None:
        tape.write("run_end", 9.5, status=end, parameters_sha256=DIGEST, seconds=9.5)
    tape.close()


def evaluation(file, loss, **flags):
    found = {"file": file, "loss": loss, "metrics": {"val_bits": 2.0}}
    return json.dumps(found | {"initial": False, "final": False} | flags) + "\n"


def test_evaluations_get_their_checkpoint_s_time_and_tokens(tmp_path):
    write_tape(tmp_path, end="finished")
    (tmp_path / "evaluations.jsonl").write_text(
        evaluation("step-1-0.ckpt", 5.5, initial=True)
        + evaluation("step-1-9.ckpt", 2.5, final=True)
        + '{"file": "step-1-10'  # the evaluator was killed here
    )
    assert finish_run(tmp_path, "finished", draw=False) == 2.5
    first, last = [event for event in read_tape(tmp_path / "tape.jsonl")][-2:]
    assert (first["event"], first["checkpoint_t_s"], first["tokens_merged"]) == (
        "evaluation",
        3.0,
        0,
    )
    assert (last["checkpoint_t_s"], last["tokens_merged"], last["t_s"]) == (8.0, 640, 9.5)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["parameters_sha256"] == DIGEST
    assert summary["loss"]["initial"] == 5.5 and summary["metrics"] == {"val_bits": 2.0}


@pytest.mark.parametrize(
    ("written", "seen", "status"),
    [
        (None, "failed", "failed"),
        (None, "interrupted", "interrupted"),
        ("interrupted", "failed", "failed"),
        ("failed", "finished", "failed"),
    ],
)
def test_the_end_is_the_worse_of_what_syncer_and_launcher_saw(tmp_path, written, seen, status):
    write_tape(tmp_path, end=written)
    assert finish_run(tmp_path, seen, draw=False) is None
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == status
    assert [event["event"] for event in read_tape(tmp_path / "tape.jsonl")][-1] == "run_end"


def test_a_resumed_run_adds_only_what_is_new(tmp_path):
    write_tape(tmp_path, end="interrupted")
    path = tmp_path / "evaluations.jsonl"
    path.write_text(evaluation("step-1-0.ckpt", 5.5, initial=True))
    finish_run(tmp_path, "interrupted", draw=False)
    tape = TapeWriter(tmp_path / "tape.jsonl")
    tape.write("syncer_start", 12.0, epoch=2, versions=[])  # and killed before it could end
    tape.close()
    path.write_text(path.read_text() + evaluation("step-1-9.ckpt", 2.5, final=True))
    assert finish_run(tmp_path, "finished", draw=False) == 2.5
    events = list(read_tape(tmp_path / "tape.jsonl"))
    files = [event["file"] for event in events if event["event"] == "evaluation"]
    assert files == ["step-1-0.ckpt", "step-1-9.ckpt"]
    ends = [event["status"] for event in events if event["event"] == "run_end"]
    assert ends == ["interrupted", "finished"]


def test_without_a_tape_there_is_nothing_to_finish(tmp_path):
    assert finish_run(tmp_path, "failed") is None
    assert list(tmp_path.iterdir()) == []
