"""`dd-lightning status` and `checkpoint` against a real syncer with scripted learners."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dd_lightning.commands import checkpoint, status
from dd_lightning.protocol.messages import Query, encode, seal
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.operator_channel import Declined, OperatorChannel
from dd_lightning.transport.rendezvous import lookup
from tests.syncer_learner import ScriptedLearner
from tests.syncer_process import END_S, RUN_S, SETTINGS, Syncer, until

pytestmark = pytest.mark.integration
LONG = 1_000_000
TIMEOUT = ("--timeout", str(END_S))


class Learners:
    """Two scripted learners in threads, which join whatever syncer is there until `end`."""

    def __init__(self, address: str) -> None:
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(address, str(i))) for i in range(2)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, address: str, name: str) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(OSError):  # the syncer is away: another try
                channel = LearnerChannel(lookup(address, END_S), max_message_bytes=1 << 24)
                try:
                    learner = ScriptedLearner(channel, name, LONG)
                    learner.join()
                    while not self._ended.is_set():
                        learner.turn()
                finally:
                    channel.close()
            time.sleep(0.05)

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(RUN_S)
            assert not thread.is_alive()


@pytest.fixture
def run(tmp_path):
    """(run folder, function that starts the run's syncer); learners are started with the first."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> Syncer:
            syncer = Syncer(tmp_path / "run", *SETTINGS, f"max_steps={LONG}", *arguments)
            stack.callback(syncer.kill)
            if "--resume" not in arguments:
                learners = Learners(syncer.address)
                stack.callback(learners.end)
            return syncer

        yield tmp_path / "run", start


def asked(command: Any, *arguments: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a command, run here."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = command.main(list(arguments))
    return code, out.getvalue(), error.getvalue()


def seen(address: str) -> dict[str, Any]:
    code, out, _ = asked(status, address, "--json", *TIMEOUT)
    assert code == 0
    return json.loads(out)


def test_status_of_a_running_run(run) -> None:
    folder, start = run
    syncer = start()
    until(lambda: seen(syncer.address)["merges"] >= 4)
    told = seen(str(folder))  # the same, by its folder
    assert set(told["learners"]) == {"0", "1"} and told["state"] == "running"
    for row in told["learners"].values():
        assert row["state"] == "training" and row["step"] > 0 and row["bytes_up"] > 0
        assert row["strategy"] == "Scripted" and row["peer"].startswith("127.0.0.1")
    code, table, _ = asked(status, syncer.address, *TIMEOUT)
    assert code == 0
    for shown in ("training", "Scripted", "merges/min", told["run_id"], "checkpoint step-1-"):
        assert shown in table
    flooded_by_one_operator_the_run_goes_on(syncer)
    syncer.kill()
    for command in (status, checkpoint):
        code, out, error = asked(command, str(folder), "--timeout", "5")
        assert code == 1 and out == "" and error.count("\n") == 1
        assert error.startswith(f"no answer of a syncer at {syncer.address}")


def flooded_by_one_operator_the_run_goes_on(syncer: Syncer) -> None:
    before = seen(syncer.address)
    channel = OperatorChannel(lookup(syncer.address, END_S), connect_timeout_s=END_S)
    for number in range(10, 15):
        channel._socket.send(encode(Query(number=number, what="status")))
        channel._socket.send(seal(b"no message"))  # a wrong checksum would end the session
    with pytest.raises(ConnectionError):  # closed, once it asked too often
        while True:
            with contextlib.suppress(Declined):
                channel.ask("status", END_S)
    channel.close()
    until(lambda: seen(syncer.address)["merges"] > before["merges"] + 2)
    after = seen(syncer.address)
    assert after["malformed"] > before["malformed"]
    assert after["refused_queries"] > before["refused_queries"]
    assert [row["generation"] for row in after["learners"].values()] == [1, 1]


def test_a_watch_says_that_the_syncer_is_away_and_goes_on(run) -> None:
    folder, start = run
    syncer = start()
    until(lambda: (folder / "syncer" / "step-1-0.ckpt").exists())
    watch = subprocess.Popen(
        [sys.executable, "-m", "dd_lightning.cli", "status", syncer.address, "--watch", "--json"]
        + list(TIMEOUT),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        first = json.loads(watch.stdout.readline())
        assert first["epoch"] == 1
        syncer.kill()
        lines = (json.loads(line) for line in watch.stdout)
        away = next(line for line in lines if "away" in line)
        assert "the syncer is away since" in away["away"]
        resumed = start("--resume")
        assert resumed.address == syncer.address
        back = next(line for line in lines if "away" not in line)
        assert back["epoch"] == 2 and back["run_id"] == first["run_id"]
        watch.send_signal(signal.SIGINT)
        assert watch.wait(END_S) == 0
    finally:
        watch.kill()
        watch.wait(END_S)
        watch.stdout.close()


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("/nonexistent", "holds no syncer/ports.json; allowed: tcp://HOST:PORT"),
        ("tcp://127.0.0.1", "has no port"),
    ],
)
def test_a_wrong_target_is_told_what_is_allowed(target, said) -> None:
    for command in (status, checkpoint):
        with pytest.raises(ValueError, match=said):
            command.main([target])
