"""`dd-lightning syncer` as a process, with scripted learners over loopback sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer import command
from dd_lightning.syncer.checkpoint import newest_checkpoint, parameters_sha256, read_checkpoint
from dd_lightning.transport.learner_channel import LearnerChannel
from dd_lightning.transport.rendezvous import lookup
from tests.syncer_learner import ScriptedLearner
from tests.syncer_process import END_S, RUN_S, SETTINGS, Syncer, until

pytestmark = pytest.mark.integration

LOOKUP_S = 60.0
LONG = 1_000_000  # steps of learners that are ended before
FINISHED, WRONG, INTERRUPTED = 0, 2, 130


@pytest.fixture
def start(tmp_path):
    """Starts syncers of one run, and ends what a failed test leaves."""
    started = []

    def begin(*arguments: str) -> Syncer:
        started.append(Syncer(tmp_path / "run", *arguments))
        return started[-1]

    yield begin
    for syncer in started:
        if syncer.process.poll() is None:
            syncer.process.kill()
            syncer.process.communicate(timeout=END_S)


@pytest.fixture
def learners():
    """Learners on channels of their own; `ScriptedLearner`s that are not released fail."""
    channels = []

    def make(address: str, count: int, steps: int) -> list[ScriptedLearner]:
        found = []
        for index in range(count):
            rendezvous = lookup(address, LOOKUP_S)
            channels.append(LearnerChannel(rendezvous, max_message_bytes=1 << 24))
            found.append(ScriptedLearner(channels[-1], str(index), steps))
        return found

    yield make
    for channel in channels:
        channel.close()


def run_all(learners: list[ScriptedLearner]) -> list[threading.Thread]:
    """Run each to its release in a thread, and leave then."""

    def go(learner: ScriptedLearner) -> None:
        learner.run(RUN_S)
        learner.channel.close()

    threads = [threading.Thread(target=go, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    return threads


def join_all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join(RUN_S)
        assert not thread.is_alive()


def tape_of(run_dir: Path) -> list[dict]:
    return list(read_tape(run_dir / "tape.jsonl"))


def kinds(events: list[dict], kind: str) -> list[dict]:
    return [event for event in events if event["event"] == kind]


def test_a_run_of_two_learners(tmp_path, start, learners) -> None:
    syncer = start(*SETTINGS)
    both = learners(syncer.address, 2, 40)
    join_all(run_all(both))
    assert syncer.end(RUN_S) == FINISHED
    run_dir = tmp_path / "run"
    events = tape_of(run_dir)
    assert [event["event"] for event in events[:2]] == ["run", "syncer_start"]
    merges = kinds(events, "merge")
    assert len(merges) >= 8
    assert any(set(merge["contributors"]) == {"0", "1"} for merge in merges)
    for ledger in kinds(events, "ledger"):
        for row in ledger["fragments"]:
            assert row["processed"] == 400 == row["merged"] + row["lost"] + row["pending"]
    stats = kinds(events, "learner_stats")[-1]
    assert stats["bytes_up"] > 0 and stats["bytes_down"] > 0
    end = events[-1]
    assert (end["event"], end["status"]) == ("run_end", "finished")
    found = read_checkpoint(newest_checkpoint(run_dir / "syncer", verify=True))
    assert end["parameters_sha256"] == parameters_sha256(found.parameters)
    assert found.state["core"]["merges"] == len(merges)
    checkpoints = kinds(events, "checkpoint")
    assert checkpoints[0]["file"] == "step-1-0.ckpt" and checkpoints[0]["tokens_merged"] == 0
    assert (run_dir / "syncer" / "step-1-0.ckpt").exists()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["rounds"]) == ("finished", len(merges))
    status = json.loads((run_dir / "syncer" / "status.json").read_text())
    assert status["merges"] == len(merges)


def test_sigterm_lets_learners_go_and_writes_the_last_checkpoint(tmp_path, start, learners) -> None:
    # with time enough to write, however busy the machine
    settings = ("checkpoint_every_s=1000", f"max_steps={LONG}", f"timeouts.shutdown={END_S}")
    syncer = start(*SETTINGS, *settings)
    both = learners(syncer.address, 2, LONG)
    threads = run_all(both)
    until(lambda: len(kinds(tape_of(tmp_path / "run"), "merge")) >= 4)
    syncer.process.send_signal(signal.SIGTERM)
    assert syncer.end(END_S) == INTERRUPTED
    join_all(threads)
    assert all(learner.told_to_finish == "SIGTERM" for learner in both)
    events = tape_of(tmp_path / "run")
    assert (events[-1]["event"], events[-1]["status"]) == ("run_end", "interrupted")
    found = read_checkpoint(newest_checkpoint(tmp_path / "run" / "syncer", verify=True))
    assert found.state["core"]["merges"] == len(kinds(events, "merge"))
    assert events[-1]["parameters_sha256"] == parameters_sha256(found.parameters)


def test_sigint_before_any_learner_ends_the_run(tmp_path, start) -> None:
    syncer = start(*SETTINGS)
    syncer.process.send_signal(signal.SIGINT)
    assert syncer.end(END_S) == INTERRUPTED
    end = tape_of(tmp_path / "run")[-1]
    assert (end["status"], end["parameters_sha256"]) == ("interrupted", None)


def test_a_killed_syncer_is_resumed_on_its_ports_in_a_new_epoch(tmp_path, start, learners) -> None:
    syncer = start(*SETTINGS, f"max_steps={LONG}", "timeouts.reanchor=2")
    threads = run_all_until_lost(learners(syncer.address, 2, LONG))
    folder = tmp_path / "run" / "syncer"
    until(
        lambda: (newest := newest_checkpoint(folder)) is not None and newest.name != "step-1-0.ckpt"
    )
    syncer.process.kill()
    syncer.process.communicate(timeout=END_S)
    join_all(threads)
    kept = read_checkpoint(newest_checkpoint(folder, verify=True))
    again = start(*SETTINGS, "--resume", "timeouts.reanchor=2")
    assert again.address == syncer.address
    join_all(run_all(learners(again.address, 2, 40)))
    assert again.end(RUN_S) == FINISHED
    events = tape_of(tmp_path / "run")
    starts = kinds(events, "syncer_start")
    assert [one["epoch"] for one in starts] == [1, 2]
    assert starts[1]["versions"] == [[2, n] for _, n in kept.state["versions"]]
    later = [merge for merge in kinds(events, "merge") if merge["epoch"] == 2]
    assert [merge["reanchor"] for merge in later[:1]] == [True]
    assert [event["t_s"] for event in starts] == sorted(event["t_s"] for event in starts)
    assert len(kinds(events, "run")) == 1
    assert events[-1]["status"] == "finished"


def run_all_until_lost(learners: list[ScriptedLearner]) -> list[threading.Thread]:
    """Run each until the syncer is gone."""

    def go(learner: ScriptedLearner) -> None:
        with pytest.raises(ConnectionError):
            learner.run(RUN_S)

    threads = [threading.Thread(target=go, args=(learner,)) for learner in learners]
    for thread in threads:
        thread.start()
    return threads


def test_a_second_syncer_of_the_run_is_refused(tmp_path, start, learners, capsys) -> None:
    syncer = start(*SETTINGS, f"max_steps={LONG}", f"timeouts.shutdown={END_S}")
    threads = run_all(learners(syncer.address, 2, LONG))
    until(lambda: newest_checkpoint(tmp_path / "run" / "syncer") is not None)
    for arguments, said in ((("--resume",), "whose syncer is running"), ((), "give --resume")):
        # in this process: another of its own would only import for seconds
        code = command.main(["--run-dir", str(tmp_path / "run"), *SETTINGS, *arguments])
        out, error = capsys.readouterr()
        assert code == WRONG and out == "" and said in error
    syncer.process.send_signal(signal.SIGTERM)
    assert syncer.end(END_S) == INTERRUPTED
    join_all(threads)
    assert len(kinds(tape_of(tmp_path / "run"), "syncer_start")) == 1


def test_a_wrong_setting_is_one_line_and_nothing_is_written(tmp_path) -> None:
    code, error = refused("--run-dir", str(tmp_path / "run"), "algorithm.quorum=5", "learners=2")
    assert code == WRONG
    assert error.startswith("algorithm.quorum is 5; allowed:") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def refused(*arguments: str) -> tuple[int, str]:
    """(exit code, stderr) of a syncer that does not start."""
    done = subprocess.run(
        [sys.executable, "-m", "dd_lightning.syncer.command", *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == ""
    return done.returncode, done.stderr
