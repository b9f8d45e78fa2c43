"""Sweeps of real runs: killed in the middle, gone on with, reported.

Slow: the sweep of 3 x 3 x 2 runs, real processes, and submitit, each of whose jobs starts a Python
of its own.
"""

from __future__ import annotations

import csv
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from dd_lightning.cli import main as cli
from dd_lightning.launch import app
from dd_lightning.launch.leftovers import leftovers
from tests.simulated_runs import QUICK
from tests.sweeps import finished, stamps, summaries

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

WAIT_S = 200.0  # of a busy machine
TINY = (
    *QUICK,
    "task.module.gpt.width=16",
    "task.module.gpt.heads=2",
    "task.data.batch_size=1",
    "task.data.max_bytes=300000",
    "task.data.validation_samples=8",
    "evaluate.every_s=1000",
    "checkpoint.every_s=1000",
    "simulate.step_s=0.5",  # so that a few steps outlast the handshakes
    "trainer.max_steps=8",
)
REAL = (
    "experiment=smoke",
    "launcher.step_floor_s=0.02",
    "trainer.max_steps=60",
    "checkpoint.every_s=0.5",
    "task.module.gpt.width=16",
    "task.module.gpt.heads=2",
    "task.data.max_bytes=300000",
    "chaos.min_left_s=0",
)
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
WORKERS = """
import os, sys, time
from pathlib import Path
from joblib import Parallel, delayed
from dd_lightning.launch import sweep
from dd_lightning.launch.interrupt import Interrupt

def job(folder, number):
    with sweep.ends_with_sweep(), Interrupt() as interrupt:
        Path(folder, f"{number}.begun").write_text(str(os.getpid()))
        while not interrupt.requested:
            time.sleep(0.02)
        Path(folder, f"{number}.interrupted").touch()
        raise KeyboardInterrupt

os.environ[sweep.PID] = str(os.getpid())
Parallel(n_jobs=2)(delayed(job)(sys.argv[1], number) for number in range(4))
"""


def kill_alone(process):
    """SIGKILL to this process only; the command lines of its family that outlived it by 30 s."""
    family = process.children(recursive=True)
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(family, timeout=30.0)
    survivors = [one.cmdline() for one in alive]
    for one in alive:
        one.kill()
    return survivors


class Sweep:
    """One sweep: started and killed in a process of its own, or played in this one."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder = folder
        cache = f"task.data.cache_dir={folder.parent / 'data'}"
        self._overrides = [*overrides, cache, f"hydra.sweep.dir={folder}"]

    def kill_after(self, jobs: int, *launcher: str) -> None:
        """SIGKILL once so many jobs have finished (0: a run has begun); nobody survives it."""
        command = [sys.executable, "-m", "dd_lightning.cli", "launch", "-m"]
        with open(self.folder.parent / "said.log", "w") as said:
            process = psutil.Popen(
                [*command, *self._overrides, *launcher], stdout=said, stderr=said
            )
        deadline = time.monotonic() + WAIT_S
        try:
            while not self._far_enough(jobs):
                text = Path(said.name).read_text()
                assert process.poll() is None and time.monotonic() < deadline, text[-3000:]
                time.sleep(0.02)
        finally:
            survivors = kill_alone(process)
        assert survivors == []

    def _far_enough(self, jobs: int) -> bool:
        if jobs == 0:
            return any(path.stat().st_size > 5000 for path in self.folder.glob("*/tape.jsonl"))
        return len(finished(self.folder)) >= jobs

    def play(self, *launcher: str) -> None:
        """To its end, in this process."""
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        try:
            app.main(["-m", *self._overrides, *quiet, *launcher])
        finally:
            GlobalHydra.instance().clear()


def means_and_spreads(folder: Path, settings: tuple[str, ...]) -> dict[tuple[str, ...], list]:
    """Of the validation loss, by what was swept, from the summaries and nothing else."""
    found = defaultdict(list)
    for name, summary in summaries(folder).items():
        given = dict(
            line.split("=", 1)
            for line in yaml.safe_load((folder / name / ".hydra" / "overrides.yaml").read_text())
        )
        found[tuple(given[one] for one in settings)].append(summary["loss"]["validation"])
    return {key: [statistics.mean(v), statistics.stdev(v), len(v)] for key, v in found.items()}


@pytest.mark.parametrize(
    ("networks", "learners", "kill_at", "launcher"),
    [
        pytest.param("lan,us_eu", "2", 1, [], id="2x1x2"),
        pytest.param("lan,us_eu", "2", 1, JOBLIB, marks=[pytest.mark.slow], id="joblib"),
        pytest.param(
            "lan,us_eu,three_continents", "2,3,4", 7, [], marks=[pytest.mark.slow], id="3x3x2"
        ),
    ],
)
def test_a_killed_sweep_goes_on_and_its_report_is_that_of_its_summaries(
    networks, learners, kill_at, launcher, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["dd-lightning launch"])
    swept = (f"network={networks}", f"learners={learners}", "seed=1,2")
    sweep = Sweep(tmp_path / "sweep", *TINY, *swept)
    jobs = list(itertools.product(networks.split(","), learners.split(","), "12"))
    sweep.kill_after(kill_at, *launcher)
    before = stamps(sweep.folder)
    assert kill_at <= len(before) < len(jobs)
    sweep.play()
    after = stamps(sweep.folder)
    assert {name: after[name] for name in before} == before  # not played again
    assert capsys.readouterr().out.count("skipped: ") == len(before)
    assert len(after) == len(jobs) == len(summaries(sweep.folder))

    assert cli(["report", str(sweep.folder)]) == 0
    own = means_and_spreads(sweep.folder, ("network", "learners"))
    with open(sweep.folder / "study.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(own) == len(jobs) / 2
    for row in rows:
        key = (row["network"], row.get("learners", learners))
        told = [row["validation_loss_mean"], row["validation_loss_std"], row["runs"]]
        assert [float(one) for one in told] == pytest.approx(own[key], rel=1e-12)


def test_workers_of_joblib_end_in_order_once_their_sweep_was_killed(tmp_path):
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    process = psutil.Popen([sys.executable, str(script), str(tmp_path)])
    deadline = time.monotonic() + WAIT_S
    while len(list(tmp_path.glob("*.begun"))) < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    assert kill_alone(process) == []
    assert {path.stem for path in tmp_path.glob("*.interrupted")} == {"0", "1"}  # not 2 and 3


@pytest.mark.slow
def test_a_killed_sweep_of_real_processes_leaves_none_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dd-lightning launch"])
    sweep = Sweep(tmp_path / "sweep", *REAL, "seed=1")
    sweep.kill_after(0)
    assert leftovers(sweep.folder / "0") == []
    assert summaries(sweep.folder) == {}  # nobody was left to write one
    sweep.play()
    assert finished(sweep.folder) == ["0"]


@pytest.mark.slow
def test_submitit_plays_jobs_and_skips_them(tmp_path):
    sweep = tmp_path / "sweep"
    command = [sys.executable, "-m", "dd_lightning.cli", "launch", "-m", *TINY, "seed=1,2"]
    command += ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    command += [f"task.data.cache_dir={tmp_path / 'data'}", f"hydra.sweep.dir={sweep}"]
    for _ in range(2):
        subprocess.run(command, check=True, timeout=1.4 * WAIT_S)
        found = stamps(sweep)
        assert len(found) == 2
    logs = "".join(path.read_text() for path in sweep.glob(".submitit/*/*_log.out"))
    assert logs.count("skipped: ") == 2
    assert "seed=1" in json.loads((sweep / "0" / "job.json").read_text())["overrides"]
