"""`dd-lightning launch experiment=smoke`, end to end: one run, all that is promised of it."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import lightning.pytorch as pl
import psutil
import pytest
import yaml

from dd_lightning.protocol.tape import read_tape
from tests.trainers import QUIET

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "tests" / "schema" / "summary.schema.json").read_text())
COMMAND = [sys.executable, "-m", "dd_lightning.cli", "launch"]
RUN_TIMEOUT_S = 300  # 90 s on two cores of its own
INTERRUPTED_WITHIN_S = 5.0
ATTEMPTS = 3  # at ending so fast, on a machine that may be busy


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepared text that the runs of this module share."""
    return tmp_path_factory.mktemp("data")


def environment(data):
    return os.environ | {"DD_DATA": str(data), "OMP_NUM_THREADS": "1"}


def read_json(path):
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory, data):
    """The run folder of one finished smoke run, and what was printed."""
    folder = tmp_path_factory.mktemp("smoke") / "run"
    command = [*COMMAND, "experiment=smoke", f"hydra.run.dir={folder}"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(data), timeout=RUN_TIMEOUT_S
    )
    logs = "".join(f"\n{log}:\n{log.read_text()[-1500:]}" for log in folder.rglob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    return folder, done.stdout


@pytest.mark.timeout(RUN_TIMEOUT_S + 10)
def test_a_smoke_run_keeps_every_promise(smoke):
    folder, printed = smoke
    summary = read_json(folder / "summary.json")
    jsonschema.validate(summary, SCHEMA)
    assert summary["status"] == "finished" and "finished" in printed
    assert (summary["task"], summary["learners"]) == ("text", 2)
    assert summary["rounds"] >= 8 and summary["merges_per_fragment"]["min"] >= 1
    loss = summary["loss"]
    assert loss["validation"] < 0.8 * loss["initial"]
    assert loss["initial"] == pytest.approx(math.log(256), rel=0.1)  # uniform over bytes
    for learner in summary["per_learner"].values():
        # who is ready later starts at the run's clock: its schedule ends with the others'
        assert 600 <= learner["steps"] <= 700 and learner["joins"] == 1
        assert learner["step_seconds_p50"] >= 0.045  # padded by sleeping
        # 90 s on a machine of its own: most of the run is its steps
        assert summary["seconds"] < 2.5 * learner["steps"] * learner["step_seconds_p50"]
    assert_run_folder(folder)
    assert_time_for_faults(folder)


def assert_run_folder(folder):
    for name in ("report.html", "config.yaml", "syncer.log", "evaluator.log"):
        assert (folder / name).stat().st_size > 0, name
    for learner in ("0", "1"):
        assert (folder / "learners" / learner / "learner.log").exists()
        assert list((folder / "learners" / learner).glob("csv/*/metrics.csv"))
    assert list((folder / "figures").glob("*.png"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["learners"] == 2
    evaluations = [event for event in read_tape(folder / "tape.jsonl") if "final" in event]
    evaluations = [event for event in evaluations if event["event"] == "evaluation"]
    assert evaluations[0]["initial"] and evaluations[-1]["final"]
    assert all(event["checkpoint_t_s"] is not None for event in evaluations)


def assert_time_for_faults(folder):
    """At least 25 s of steps are left after the first checkpoint that is not version 0's."""
    events = list(read_tape(folder / "tape.jsonl"))
    first = next(e["t_s"] for e in events if e["event"] == "checkpoint" and e["tokens_merged"])
    last = max(e["t_s"] for e in events if e["event"] == "learner_stats")
    assert last - first >= 25


def test_export_and_report_read_the_run_folder(smoke, tmp_path):
    from dd_lightning.cli import main
    from dd_lightning.syncer.checkpoint import newest_checkpoint

    folder, _ = smoke
    out = tmp_path / "model.ckpt"
    assert main(["export", str(newest_checkpoint(folder / "syncer")), "--out", str(out)]) == 0
    assert out.stat().st_size > 0
    before = read_json(folder / "summary.json")
    assert main(["report", str(folder)]) == 0
    assert read_json(folder / "summary.json") == before


def test_the_exported_model_evaluates_to_the_loss_of_the_summary(smoke, tmp_path):
    from dd_lightning.cli import main
    from dd_lightning.launch.task import build_data
    from dd_lightning.syncer.checkpoint import newest_checkpoint
    from dd_lightning.tasks.text import GPTModule

    folder, _ = smoke
    out = tmp_path / "model.ckpt"
    assert main(["export", str(newest_checkpoint(folder / "syncer")), "--out", str(out)]) == 0
    values = yaml.safe_load((folder / "config.yaml").read_text())
    trainer = pl.Trainer(**QUIET)
    data = build_data(values)
    found = trainer.validate(GPTModule.load_from_checkpoint(out), datamodule=data, verbose=False)
    promised = read_json(folder / "summary.json")["loss"]["validation"]
    assert found[0]["val_loss"] == pytest.approx(promised, abs=1e-6)


@pytest.mark.timeout(RUN_TIMEOUT_S)
def test_an_interrupt_ends_everything_within_five_seconds(tmp_path, data):
    ends = (interrupted_run(tmp_path / str(n) / "run", data) for n in range(ATTEMPTS))
    assert any(took < INTERRUPTED_WITHIN_S and saved for took, saved in ends)


def interrupted_run(folder, data):
    """Seconds from the signal to the end, and whether the syncer wrote its state."""
    command = [*COMMAND, "experiment=smoke", "network=us", f"hydra.run.dir={folder}"]
    run = psutil.Popen(command, env=environment(data), stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + RUN_TIMEOUT_S / ATTEMPTS
        while not has_merged(folder):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        family = run.children(recursive=True)
        assert len(family) >= 5  # syncer, proxy, evaluator, two learners
        run.send_signal(signal.SIGINT)
        started = time.monotonic()
        code = run.wait(timeout=30)
        took = time.monotonic() - started
    finally:
        if run.is_running():
            for process in [*run.children(recursive=True), run]:
                process.kill()
    assert code == 130
    assert psutil.wait_procs(family, timeout=0)[1] == []
    summary = read_json(folder / "summary.json")
    jsonschema.validate(summary, SCHEMA)
    assert summary["status"] == "interrupted"
    return took, summary["parameters_sha256"] is not None


def has_merged(folder):
    tape = folder / "tape.jsonl"
    return tape.exists() and any(event["event"] == "merge" for event in read_tape(tape))


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_TIMEOUT_S)
def test_a_sweep_runs_each_job_in_a_folder_of_its_own(tmp_path, data):
    command = [*COMMAND, "-m", "experiment=smoke", "trainer.max_steps=60,80"]
    command += ["launcher.step_floor_s=0", f"hydra.sweep.dir={tmp_path}"]
    subprocess.run(command, env=environment(data), check=True, timeout=2 * RUN_TIMEOUT_S)
    for job, steps in enumerate((60, 80)):
        summary = read_json(tmp_path / str(job) / "summary.json")
        assert summary["status"] == "finished"
        assert max(one["steps"] for one in summary["per_learner"].values()) == steps
