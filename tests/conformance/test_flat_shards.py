"""FSDP1's parameters are read and written in slices, as those of the module in one piece."""

import subprocess
import sys

import pytest

from dd_lightning.launch.processes import scrubbed_environment
from tests.conformance.flat_job import RANKS
from tests.conformance.jobs import JOB_S, ROOT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_flat_shards_are_read_and_written_as_in_one_piece(tmp_path):
    command = [sys.executable, "-m", "tests.conformance.flat_job"]
    logs = [tmp_path / f"{rank}.log" for rank in range(RANKS)]
    ranks = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as out:
                arguments = [str(rank), str(tmp_path / "store")]
                ranks.append(
                    subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=out, stderr=out,
                                     env=scrubbed_environment(1))
                )  # fmt: skip
        codes = [process.wait(JOB_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * RANKS, "".join(log.read_text()[-3000:] for log in logs)
