"""Groups in the launcher: a lost rank is one lost learner; all ranks end with the run."""

import json
import os
import signal
import sys
import time

import jsonschema
import psutil
import pytest

from dd_lightning.protocol.tape import read_tape
from tests.chaos_runs import COMMAND, SCHEMA

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

SMALL = ["task.module.gpt.width=16", "task.data.validation_samples=32"]
START_S, END_S = 180.0, 180.0


class Launched:
    """A run whose processes are looked at while it runs."""

    def __init__(self, folder, data, *overrides):
        self.folder = folder
        environment = os.environ | {"DD_DATA": str(data), "OMP_NUM_THREADS": "1"}
        command = [*COMMAND, *SMALL, *overrides, f"hydra.run.dir={folder}"]
        self.log = folder.with_suffix(".log")
        with self.log.open("w") as out:
            self.process = psutil.Popen(command, env=environment, stdout=out, stderr=out)

    def wait_for(self, event, **fields):
        """Until the tape has such an event."""
        tape, deadline = self.folder / "tape.jsonl", time.monotonic() + START_S
        while not (tape.exists() and _has(read_tape(tape), event, fields)):
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, f"no {event} {fields}"
            time.sleep(0.1)

    def ranks(self, learner):
        """Processes of a learner, the first rank first."""
        family = self.process.children(recursive=True)
        own = ["--learner", learner]
        found = [process for process in family if process.cmdline()[-2:] == own]
        return sorted(found, key=lambda process: process.create_time())

    def summary(self):
        summary = json.loads((self.folder / "summary.json").read_text())
        jsonschema.validate(summary, SCHEMA)
        return summary

    def end(self):
        for process in [*self.process.children(recursive=True), self.process]:
            process.kill()


def _has(events, event, fields):
    return any(
        one["event"] == event and all(one.get(key) == value for key, value in fields.items())
        for one in events
    )


@pytest.fixture
def launch(tmp_path):
    started = []

    def start(*overrides):
        started.append(Launched(tmp_path / f"run{len(started)}", tmp_path / "data", *overrides))
        return started[-1]

    yield start
    for run in started:
        if run.process.is_running():
            run.end()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes as on Linux")
@pytest.mark.parametrize(
    ("kind", "strategy"), [("ddp", "DDPStrategy"), ("fsdp2", "ModelParallelStrategy")]
)
def test_killing_one_rank_kills_that_learner_only_and_it_comes_back_whole(launch, kind, strategy):
    run = launch(f"learner={kind}", "trainer.max_steps=700", "launcher.max_restarts=3")
    run.wait_for("learner_checkpoint", learner="0")
    first, second = run.ranks("0")
    second.kill()
    assert run.process.wait(END_S) == 0, run.log.read_text()[-3000:]
    summary, events = run.summary(), list(read_tape(run.folder / "tape.jsonl"))
    assert first.pid not in psutil.pids()
    joins = [e for e in events if e["event"] == "join" and e["learner"] == "0"]
    assert [join["state_from"] for join in joins] == ["cold", "checkpoint"]
    assert all(join["ranks"] == 2 for join in joins) and joins[1]["state_step"] > 0
    assert summary["per_learner"]["0"]["ranks"] == 2
    assert summary["per_learner"]["0"]["strategy"] == strategy
    assert summary["per_learner"]["1"]["joins"] == 1
    assert max(e["steps"] for e in summary["per_learner"].values()) == 700
    for learner in summary["per_learner"].values():
        for row in learner["ledger"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]


def test_an_interrupt_ends_every_rank_and_leaves_a_checkpoint(launch):
    run = launch("learner=ddp", "trainer.max_steps=2000", "checkpoint.every_s=1000")
    run.wait_for("merge")
    family = run.process.children(recursive=True)
    ranks = [*run.ranks("0"), *run.ranks("1")]
    assert len(ranks) == 4
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(30) == 130
    assert psutil.wait_procs(family, timeout=1)[1] == []
    assert run.summary()["status"] == "interrupted"
    for learner in ("0", "1"):
        log = (run.folder / "learners" / learner / "learner.log").read_text()
        assert list((run.folder / "learners" / learner / "checkpoints").glob("*.ckpt")), log[-3000:]
