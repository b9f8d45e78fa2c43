"""`replay` of runs in which something died: kills, rejoins, restarts of the syncer, late joins."""

from __future__ import annotations

import json

import pytest

from dd_lightning.cli import main
from dd_lightning.protocol.tape import read_tape
from tests.chaos_runs import RUN_TIMEOUT_S, run_with
from tests.integration.test_replay import doctored, replayed
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)

pytestmark = [
    pytest.mark.integration,
    # Lightning, of a life that goes on from a checkpoint
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

DROPOUT = "task.module.gpt.dropout=0.1"
LONG = [
    "trainer.max_steps=60",
    "network=us_eu",
    "simulate.distribution=normal",
    "simulate.jitter=0.1",
    "simulate.restart_s=0.3",
    "chaos.min_left_s=0",
    "task.data.validation_samples=32",
    DROPOUT,
]
KILL = ["chaos=kill_learner", "chaos.at_step=25"]
SYNCER = ["chaos=kill_syncer", "chaos.at_step=25"]
STREAMING = ["algorithm=streaming", "algorithm.sync_every=6", "algorithm.fragments=3"]


def joins_of(folder):
    """(cause, where its inner state is from) of every join."""
    rows = [row for row in read_tape(folder / "tape.jsonl") if row["event"] == "join"]
    return {(row["cause"], row["state_from"]) for row in rows}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([*KILL, "algorithm.apply=rebase", "algorithm.codec=bf16"], ("join", "checkpoint")),
        (["algorithm.max_learners=3", "simulate.joins={2: 1.2}"], ("join", "peer")),
        ([*SYNCER, "algorithm.apply=mix", "algorithm.codec=bf16"], ("re-attach", "self")),
        ([*SYNCER, *STREAMING], ("re-attach", "self")),
    ],
    ids=["kill, rebase", "a peer's state", "syncer, mix", "syncer, streaming"],
)
def test_whatever_died_it_is_replayed_bit_for_bit(capsys, simulate, settings, expected):  # noqa: F811
    folder, summary = simulate(*LONG, *settings)
    assert expected in joins_of(folder)
    code, found = replayed(capsys, folder)
    assert (code, found["equal"], found["merges"]) == (0, True, summary["rounds"]), found


@pytest.fixture(scope="module")
def restarted(simulate):  # noqa: F811
    """A run whose syncer was killed, under rebase."""
    folder, _ = simulate(*LONG, *SYNCER, "algorithm.apply=rebase")
    return folder


def test_merges_that_a_restart_undid_are_played_and_superseded(capsys, restarted):
    rows = list(read_tape(restarted / "tape.jsonl"))
    (restart,) = [row for row in rows if row["event"] == "syncer_start" and row["epoch"] == 2]
    merges = [row for row in rows if row["event"] == "merge"]
    undone = [
        row
        for row in merges
        if row["epoch"] == 1 and row["version"][1] > restart["versions"][row["fragment"]][1]
    ]
    assert undone and any(row["reanchor"] for row in merges)
    code, found = replayed(capsys, restarted)
    assert code == 0 and found["merges"] == len(merges), found


def test_a_tape_whose_restart_went_back_to_no_state_of_the_run_is_refused(
    capsys, restarted, tmp_path
):
    def change(event):
        if event["event"] == "syncer_start" and event["epoch"] == 2:
            event["versions"][0][1] += 90
        return event

    assert main(["replay", str(doctored(restarted, tmp_path, change))]) == 2
    assert "at which the tape's merges never were" in capsys.readouterr().err


@pytest.mark.timeout(RUN_TIMEOUT_S + 120)
def test_processes_are_replayed_although_their_syncer_died_before_it_heard_of_an_apply(
    capsys, tmp_path
):
    """What a learner did while the syncer was away is on the tape through its next join."""
    run = run_with(
        tmp_path / "run",
        tmp_path / "data",
        "chaos=kill_syncer",
        "chaos.at_step=60",
        "chaos.min_left_s=0",
        "trainer.max_steps=180",
        "launcher.step_floor_s=0.02",
        "checkpoint.every_s=0.5",
        "evaluate.every_s=100",
        "algorithm.sync_every=6",
        "algorithm.fragments=3",
        "task.data.batch_size=2",
        "task.data.validation_samples=32",
        DROPOUT,
    )
    assert len(run.of("syncer_start")) == 2
    assert {row["cause"] for row in run.of("join")} >= {"re-attach"}
    code, found = replayed(capsys, run.folder)
    assert (code, found["equal"], found["merges"]) == (0, True, run.summary["rounds"]), found


def test_what_is_not_replayed_is_refused_by_name(capsys, restarted, tmp_path):
    def baseline(event):
        if event["event"] == "run":
            event["config"]["algorithm"]["preset"] = "data_parallel"
        return event

    def poisoned(event):
        if event["event"] == "fault":
            event |= {"action": "poison", "target": "1", "fired": 1.0}
        return event

    def grouped(event):
        if event["event"] == "join":
            event["ranks"] = 2
        return event

    def cut(event):
        if event["event"] == "syncer_start" and event["epoch"] == 2:
            event["restored_from"] = "cut-7"
        return event

    for number, (change, text) in enumerate(
        [(poisoned, "overwrote parameters of learner 1"), (grouped, "a group of 2 ranks"),
         (cut, "consistent cut cut-7"), (baseline, "algorithm=data_parallel")]
    ):  # fmt: skip
        to = tmp_path / str(number)
        to.mkdir()
        assert main(["replay", str(doctored(restarted, to, change))]) == 2
        assert text in capsys.readouterr().err


def test_a_donor_that_is_not_on_the_tape_is_refused(capsys, restarted, tmp_path):
    def change(event):
        if event["event"] == "join" and event["learner"] == "1":
            event["state_from"] = "peer"
        return event

    folder = doctored(restarted, tmp_path, change)
    assert main(["replay", str(folder), "--json"]) == 2
    said = capsys.readouterr()
    assert "does not say from which" in said.err and not said.out
    with pytest.raises(json.JSONDecodeError):
        json.loads(said.out)
