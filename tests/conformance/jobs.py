"""Starts learners that may be groups, against a syncer in the test's process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dd_lightning.launch.processes import scrubbed_environment
from dd_lightning.protocol.config import SyncerConfig
from tests.conformance.learner_job import DIED, main
from tests.socket_run import run_over_sockets
from tests.trainers import WAIT_S

ROOT = Path(__file__).parents[2]
JOB_S = 240.0  # on a process's whole life: loose, a tenth of it on two quiet cores
JOB = {"inner": "ddp", "devices": 2, "steps": 12, "accumulate": 1, "seed": 3, "width": 5}
JOB |= {"lr": 0.05, "measured": False, "die_at": 0, "resume": False, "next_life": None}
JOB |= {"options": {}}  # of the strategy inside
# instead of `steps`, of the run: until another learner has left this file; so many of its own
JOB |= {"until": "", "own_steps": 0, "connect_s": 60.0}
JOB |= {"checkpoint": "", "manual": False}  # to go on from; manual optimization
JOB |= {"file": False, "hydra": False}  # one file of sharded ranks; a DictConfig in its parameters
SYNCHRONOUS = {"preset": "diloco", "fragments": 2, "sync_every": 4, "overlap": 1}


def run(folder, learners, start=None, **algorithm):
    """One run of `learners` (by their jobs' differences): the tape's events.

    `start`: of a function of a learner's job that starts its ranks, in place of Lightning.
    """
    folder.mkdir()
    config = SyncerConfig.load(
        {
            "algorithm": SYNCHRONOUS | algorithm,
            "learners": len(learners),
            "max_steps": 12,
            "timeouts": {"rejoin": WAIT_S},
        }
    )
    jobs = [
        JOB | {"learner": str(index), "learners": len(learners), "folder": str(folder), **own}
        for index, own in enumerate(learners)
    ]
    return run_over_sockets(folder / "run", config, *(_learner(job, start) for job in jobs))


def _learner(job, start_ranks=None):
    def start(address):
        steps = job["steps"] * job["accumulate"] * job["devices"]
        job.update(address=address, micro_batches=steps)
        if start_ranks is not None:
            start_ranks(job)
            return
        if job["devices"] == 1:
            main(job)  # in this process, a thread of it
            return
        command = [sys.executable, "-m", "tests.conformance.learner_job", json.dumps(job)]
        environment = scrubbed_environment(1)
        log = Path(job["folder"]) / f"{job['learner']}.log"
        with log.open("a") as out:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(JOB_S)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # its ranks are in its session
                    process.wait()
        assert code == (DIED if job["die_at"] else 0), log.read_text()[-3000:]
        if job["next_life"] is not None:
            life = {"die_at": 0, "resume": True, "next_life": None, **job["next_life"]}
            _learner(job | life)(address)

    return start


def said(folder, learner, rank=0):
    """What a rank left at its end."""
    return json.loads((folder / f"{learner}-{rank}.json").read_text())
