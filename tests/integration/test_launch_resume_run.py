"""One run over three launches: a learner leaves, the syncer is killed, Ctrl-C while it is away, and
`launcher.resume=last` goes on to the end. Real processes."""

import json
import os
import signal
import subprocess
import sys
import time

import jsonschema
import psutil
import pytest

from dd_lightning.protocol.tape import read_tape
from tests.tapes import SCHEMA

pytestmark = pytest.mark.integration

WAIT_S = 180.0  # a busy machine: alone it takes a fifth of it
ENDS_WITHIN_S = 5.0
COMMAND = [sys.executable, "-m", "dd_lightning.cli", "launch"]
SETTINGS = [
    "experiment=smoke",
    "trainer.max_steps=300",
    "task.data.source=folder",
    "task.data.validation_samples=64",
    "checkpoint.every_s=1",
    "launcher.max_restarts=2",
    "launcher.restart_after_s=300",  # the syncer stays away until the interrupt
]


@pytest.fixture
def text(tmp_path):
    """A folder of small documents."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(200):
        words = " ".join(f"word{(number * number + i * i) % 97}" for i in range(300))
        (folder / f"{number}.txt").write_text(f"Document {number}. {words}")
    return folder


@pytest.fixture
def launch(tmp_path):
    """Starts the launcher on the one run folder; ends what a failed test leaves."""
    started = []

    def begin(*overrides):
        environment = os.environ | {"DD_DATA": str(tmp_path / "data"), "OMP_NUM_THREADS": "1"}
        command = [*COMMAND, f"hydra.run.dir={tmp_path / 'run'}", *overrides]
        with open(tmp_path / "launcher.log", "ab") as log:
            process = psutil.Popen(command, env=environment, stdout=log, stderr=log)
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.is_running():
            for one in [*process.children(recursive=True), process]:
                one.kill()


def events(folder, kind):
    tape = folder / "tape.jsonl"
    return [e for e in read_tape(tape) if e["event"] == kind] if tape.exists() else []


def until(condition, launcher, said):
    deadline = time.monotonic() + WAIT_S
    while not condition():
        alive = launcher.poll() is None
        assert alive and time.monotonic() < deadline, said.read_text()[-3000:]
        time.sleep(0.05)


def child(launcher, *words):
    """The launcher's child with these words on its command line."""
    for process in launcher.children():
        if set(words) <= set(process.cmdline()):
            return process
    raise AssertionError(f"no child {words}")


@pytest.mark.timeout(3 * WAIT_S)
def test_a_run_that_was_interrupted_while_its_syncer_was_away_goes_on(launch, text, tmp_path):
    folder, said = tmp_path / "run", tmp_path / "launcher.log"
    launcher = launch(*SETTINGS, f"task.data.path={text}")
    until(
        lambda: len(events(folder, "merge")) >= 3 and events(folder, "checkpoint"), launcher, said
    )
    child(launcher, "--learner", "1").terminate()
    until(lambda: "learner 1 has left; the others go on" in said.read_text(), launcher, said)
    assert (folder / "learners" / "1" / "checkpoints" / "last.ckpt").exists()
    assert [e["learner"] for e in events(folder, "leave")] == ["1"]

    child(launcher, "syncer").kill()
    until(
        lambda: "syncer was ended by SIGKILL; it is started again" in said.read_text(),
        launcher,
        said,
    )
    family = launcher.children(recursive=True)
    launcher.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert launcher.wait(timeout=30) == 130
    took = time.monotonic() - began
    assert psutil.wait_procs(family, timeout=0)[1] == []  # no orphan
    assert took < ENDS_WITHIN_S + 5.0  # on a busy machine; 5 s of its own
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"
    merged = len(events(folder, "merge"))

    assert launch("launcher.resume=last", "seed=9").wait(timeout=WAIT_S) == 0, said.read_text()
    assert "seed=9 has no effect" in said.read_text()
    summary = json.loads((folder / "summary.json").read_text())
    jsonschema.validate(summary, SCHEMA)
    assert (summary["status"], summary["seed"]) == ("finished", 1)
    assert len(events(folder, "merge")) > merged
    assert [e["epoch"] for e in events(folder, "syncer_start")] == [1, 2]
    joins = [e for e in events(folder, "join") if e["state_from"] == "checkpoint"]
    assert {e["learner"] for e in joins} == {"0", "1"}
    assert all(one["steps"] >= 200 for one in summary["per_learner"].values())
    rows = [(e["file"], e["initial"], e["final"]) for e in events(folder, "evaluation")]
    assert len(rows) == len(set(rows)) and rows[0][1] and rows[-1][2]


def test_a_folder_without_a_run_is_refused_by_name(tmp_path):
    command = [*COMMAND, f"hydra.run.dir={tmp_path}", "launcher.resume=last"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("launcher.resume is 'last'") and "holds no run" in done.stderr
