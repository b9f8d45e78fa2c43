"""Many rounds over a throttled, flapping link: memory flat, descriptors and threads constant."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cut_link import ProxyThread
from tests.syncer_process import END_S, Syncer, until

pytestmark = pytest.mark.integration

NAMES = ("0", "1")
STEP_S = 0.02
LINK = {"rtt_ms": 10, "mbit_s": 2}  # a fragment takes a few ms of the pipe
FLAP = {"do": "cut", "seconds": 0.2, "times": 1000, "every_s": 2.5}
SETTINGS = (
    "learners=2",
    "algorithm=short_run",
    "algorithm.fragments=2",
    "algorithm.sync_every=4",
    "checkpoint_every_s=3",
)
WARM_UP = 0.4  # of the rounds: caches, arenas and histories of bounded length fill up
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Sample:
    """Of one process, after so many merges."""

    merges: int
    rss: int
    descriptors: int
    threads: int


def slope_mib_per_100(samples: list[Sample]) -> float:
    """Least squares of resident memory over merges."""
    fit = statistics.linear_regression([s.merges for s in samples], [s.rss for s in samples])
    return 100 * fit.slope / MIB


def merges_of(run_dir: Path) -> int:
    """So far."""
    return json.loads((run_dir / "syncer" / "status.json").read_text())["merges"]


def watch(run_dir: Path, processes: dict[str, psutil.Process], rounds: int) -> dict[str, list]:
    """Samples of every process until so many merges are done, without the warm-up."""
    samples: dict[str, list[Sample]] = {name: [] for name in processes}
    merges = 0
    while merges < rounds:
        time.sleep(0.1)
        merges = merges_of(run_dir)
        if merges < WARM_UP * rounds:
            continue
        for name, process in processes.items():
            with process.oneshot():
                samples[name].append(
                    Sample(
                        merges,
                        process.memory_info().rss,
                        process.num_fds(),
                        process.num_threads(),
                    )
                )
    return samples


@pytest.mark.parametrize(
    ("rounds", "most_mib"),
    [
        (150, 5.0),  # too few to tell a leak from a late cache: a gross one only
        pytest.param(1000, 1.0, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_soak(tmp_path, rounds, most_mib) -> None:
    run_dir = tmp_path / "run"
    with contextlib.ExitStack() as stack:
        syncer = Syncer(run_dir, *SETTINGS)
        stack.callback(syncer.kill)
        proxy = ProxyThread(run_dir, NAMES, LINK)
        stack.callback(proxy.close)
        processes = {"syncer": psutil.Process(syncer.process.pid)}
        for name in NAMES:
            command = ["-m", "tests.learner_process", proxy.address(name), name]
            learner = subprocess.Popen(
                [sys.executable, *command, "--step-s", str(STEP_S)],
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )
            stack.callback(learner.wait, END_S)
            stack.callback(learner.kill)
            processes[f"learner {name}"] = psutil.Process(learner.pid)
        until(lambda: (run_dir / "syncer" / "status.json").exists() and merges_of(run_dir) > 0)
        proxy.order(NAMES, **FLAP)
        samples = watch(run_dir, processes, rounds)
    for name, taken in samples.items():
        slope = slope_mib_per_100(taken)
        print(f"{name}: {slope:+.2f} MiB per 100 rounds, {taken[-1]}")
        assert slope < most_mib, f"{name} grows"
        half = len(taken) // 2
        for what in ("descriptors", "threads"):  # while it dials anew it has a few more
            before, after = (
                max(getattr(one, what) for one in part) for part in (taken[:half], taken[half:])
            )
            assert after <= before + 4, f"{name} gathers {what}: {before}, then {after}"
