"""The ways in which a group's ranks come to be: Lightning's launchers, or a job's environment."""

import json
import socket
import subprocess
import sys

import pytest

from dd_lightning.launch.processes import scrubbed_environment
from tests.conformance.jobs import JOB, JOB_S, ROOT, run, said

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]


def assert_ranks_agree(folder, strategy="DDPStrategy"):
    ranks = [said(folder, 0, rank) for rank in range(2)]
    assert ranks[0]["digests"] == ranks[1]["digests"]
    assert len(ranks[0]["digests"]) == 1 + JOB["steps"]
    assert ranks[0]["strategy"] == strategy


def test_a_users_own_ddp_keeps_its_options_and_what_it_overrides(tmp_path):
    run(tmp_path / "run", [{"inner": "own_ddp", "options": {"static_graph": True}}])
    assert_ranks_agree(tmp_path / "run", "OwnDDP")
    for rank in range(2):
        found = said(tmp_path / "run", 0, rank)
        assert (found["static_graph"], found["own_steps"]) == (True, JOB["steps"])


def test_spawned_ranks(tmp_path):
    tape = run(tmp_path / "run", [{"inner": "ddp_spawn"}])
    assert next(event["ranks"] for event in tape if event["event"] == "join") == 2
    assert_ranks_agree(tmp_path / "run")


@pytest.mark.parametrize("job", ["torchrun", "slurm"])
def test_ranks_of_a_job_take_part_as_one_learner(tmp_path, job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def environment(rank):
        if job == "torchrun":
            own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            own |= {"GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1"}
        else:
            own = {"SLURM_JOB_ID": 7, "SLURM_JOB_NAME": "train", "SLURM_NTASKS": 2}
            own |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "SLURM_NODEID": 0}
            own |= {"SLURM_NTASKS_PER_NODE": 2, "SLURM_NNODES": 1, "SLURM_NODELIST": "127.0.0.1"}
        own["MASTER_PORT"] = port
        return scrubbed_environment(1) | {name: str(value) for name, value in own.items()}

    def start(job_of_rank):
        command = [sys.executable, "-m", "tests.conformance.learner_job", json.dumps(job_of_rank)]
        ranks = [subprocess.Popen(command, cwd=ROOT, env=environment(rank)) for rank in range(2)]
        try:
            assert [process.wait(JOB_S) for process in ranks] == [0, 0]
        finally:
            for process in ranks:
                process.kill()
                process.wait()

    tape = run(tmp_path / "run", [{}], start=start)
    assert [event["ranks"] for event in tape if event["event"] == "join"] == [2]
    assert_ranks_agree(tmp_path / "run")


def test_what_goes_wrong_on_rank_0_is_raised_on_every_rank(tmp_path):
    address = {"address": "tcp://127.0.0.1:1", "connect_s": 1.0, "micro_batches": 4}
    job = JOB | address | {"learner": "0", "learners": 1, "folder": str(tmp_path)}
    command = [sys.executable, "-m", "tests.conformance.learner_job", json.dumps(job)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=scrubbed_environment(1),
        capture_output=True,
        text=True,
        timeout=JOB_S,
    )
    assert done.returncode == 1
    for rank in range(2):
        assert f"[rank{rank}]: ConnectionError: no syncer at tcp://127.0.0.1:1" in done.stderr
