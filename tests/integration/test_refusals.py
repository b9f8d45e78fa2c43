"""What cannot work is refused: the syncer's settings before it starts, learners by their syncer."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dd_lightning.cli import main

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
START_S = 60.0  # imports and joining, on a busy machine
END_S = 20.0
WRONG_SETTING, INTERRUPTED = 2, 130


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("algorithm.quorum=0", r"algorithm.quorum is 0; allowed: an integer >= 1, or all\."),
        ("algorithm.quorum=3", r"algorithm.quorum is 3; allowed: 1 to 2 \(the learners\), or all"),
        ("algorithm.fragments=0", r"algorithm.fragments is 0; allowed: an integer >= 1\."),
        ("algorithm.sync_every=-24", r"algorithm.sync_every is -24; allowed: an integer >= 2\."),
        ("checkpoint_every_s=-1", r"checkpoint_every_s.* is .*-1.*; allowed: "),
        ("timeouts.heartbeat=-1", r"timeouts.heartbeat is -1.*; allowed: "),
        ("algorithm.merge=median", r".*merge is 'median'; allowed: .*rda"),
        ("algorithm.outer.lr=-1", r".*outer.lr is -1.*; allowed: "),
    ],
)
def test_a_wrong_setting_of_the_syncer(tmp_path, setting, said, capfd):
    folder = tmp_path / "run"
    assert main(["syncer", "--run-dir", str(folder), "learners=2", setting]) == WRONG_SETTING
    out, errors = capfd.readouterr()
    assert re.match(said, errors), errors
    assert (out, errors.count("\n")) == ("", 1)
    assert not folder.exists()


def test_a_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "dd_lightning.cli", "syncer"]
            + ["--listen", listen, "--run-dir", str(tmp_path / "run")],
            capture_output=True,
            text=True,
            timeout=START_S,
            env=ENVIRONMENT,
        )
    assert (done.returncode, done.stdout) == (WRONG_SETTING, "")
    assert listen.removeprefix("tcp://") in done.stderr and "free port" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def start(tmp_path):
    """Starts processes (stdout a pipe, stderr NAME.err) and ends what a failed test leaves."""
    started = []

    def begin(name, *command):
        with open(tmp_path / f"{name}.err", "w") as errors:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", *command],
                    cwd=ROOT,
                    env=ENVIRONMENT,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
            )
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=END_S)


def last_line(path):
    return path.read_text().splitlines()[-1]


def test_the_second_of_two_with_one_id_and_another_model(tmp_path, start):
    settings = ("learners=2", "algorithm.min_learners=1", "algorithm.fragments=2",
                "timeouts.heartbeat=0.5", "timeouts.lease=2")  # fmt: skip
    run_dir = ("--run-dir", str(tmp_path / "run"))
    syncer = start("syncer", "dd_lightning.cli", "syncer", *run_dir, *settings)
    address = json.loads(syncer.stdout.readline())["listening"]
    first = start("first", "tests.learner_process", address, "0")
    assert first.stdout.readline() == "training\n"
    twin = start("twin", "tests.learner_process", address, "0")
    other = start("other", "tests.learner_process", address, "1", "--width", "6")
    for process in (twin, other):
        assert process.wait(START_S) == 1
    assert re.search(
        rf"ConnectionError.*\b{first.pid}\b.*takeover", last_line(tmp_path / "twin.err")
    )
    assert re.search(r"ConnectionError.*net\.0\.bias", last_line(tmp_path / "other.err"))
    assert first.poll() is None and syncer.poll() is None  # nobody else was harmed
    syncer.send_signal(signal.SIGTERM)
    assert syncer.wait(END_S) == INTERRUPTED
    assert first.wait(END_S) == 0


def test_an_unreachable_syncer(tmp_path, start):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, so that nobody takes it, but not listening
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
        learner = start("alone", "tests.learner_process", address, "0", "--connect-timeout", "1")
        assert learner.wait(START_S) == 1
    said = last_line(tmp_path / "alone.err")
    assert re.search(rf"ConnectionError.*{address}.*\d+ attempts", said), said
