"""Consistent cuts over real sockets: everything is thrown away, and goes on from the cut."""

from __future__ import annotations

import threading

import pytest
import torch

from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.syncer.checkpoint import newest_checkpoint, read_checkpoint
from dd_lightning.syncer.cuts import complete_cuts
from tests.cut_runs import AtStep, Model, Run
from tests.trainers import WAIT_S, StartTogether, assert_equal, values

pytestmark = [
    pytest.mark.integration,
    pytest.mark.virtual,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


def config(learners: int, **algorithm) -> SyncerConfig:
    algorithm = {"outer": {"lr": 0.7, "momentum": 0.9}, **algorithm}
    # a learner that attaches anew takes its clock from the run's: not on a machine that is busy
    timeouts = {"heartbeat": 10.0, "lease": 40.0}
    values = {"algorithm": {"preset": "diloco", **algorithm}, "timeouts": timeouts}
    return SyncerConfig.load(values | {"learners": learners, "run_id": "r"})


def theta_of(run: Run) -> dict[str, torch.Tensor]:
    """Θ at the run's end."""
    path = newest_checkpoint(run.folder / "syncer", verify=True)
    return read_checkpoint(path).values


def cut_and_throw_away(folder, settings, steps, modules, at_step) -> dict:
    """Run until a cut asked for at that step of learner 0 is complete; its manifest."""
    barrier = threading.Barrier(len(modules))
    found: list = []

    def ask(run: Run) -> None:
        future = run.syncer.server.request_cut()
        future.add_done_callback(lambda done: (found.append(done), run.stop()))

    def callbacks(run: Run, index: int):
        asks = [AtStep(at_step, lambda: ask(run))] if index == 0 else []
        return [StartTogether(barrier), *asks]

    run = Run(folder, settings, steps, modules, callbacks=callbacks)
    assert run.execute() == "interrupted"
    (done,) = found
    return done.result(0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is busy a step may take seconds; a learner paused for it leaves rosters."""
    monkeypatch.setattr("dd_lightning.protocol.lifecycle.PAUSE_SECONDS", WAIT_S)


def digests(run: Run, rounds: int) -> dict[int, str]:
    """Of Θ's fragment after each of the first so many rounds; a later merge of a number counts."""
    merges = [event for event in run.tape() if event["event"] == "merge"]
    return {merge["round"]: merge["digest"] for merge in merges if merge["round"] <= rounds}


@pytest.mark.parametrize(
    ("learners", "optimizer", "algorithm"),
    [
        (2, "sgd", {"fragments": 4, "sync_every": 8, "overlap": 1}),
        (3, "adamw", {"fragments": 4, "sync_every": 8, "overlap": 2}),
        (2, "adamw", {"fragments": 1, "sync_every": 5, "overlap": 0}),
    ],
)
def test_from_a_cut_on_the_run_is_bitwise_the_uninterrupted_one(
    tmp_path, learners, optimizer, algorithm
) -> None:
    # the last step applies the last round; what the others still hold is handed in at the end, in
    # rounds whose numbers depend on who ends first, so Θ is compared up to there
    steps = 40 + algorithm["overlap"]
    rounds = 40 * algorithm["fragments"] // algorithm["sync_every"]
    settings = config(learners, wait="overlap", **algorithm)
    barrier = threading.Barrier(learners)
    undisturbed = [Model(7, optimizer) for _ in range(learners)]
    whole = Run(
        tmp_path / "whole", settings, steps, undisturbed,
        callbacks=lambda run, index: [StartTogether(barrier)],
    )  # fmt: skip
    assert whole.execute() == "finished"

    folder = tmp_path / "cut"
    thrown = [Model(7, optimizer) for _ in range(learners)]
    manifest = cut_and_throw_away(folder, settings, steps, thrown, at_step=11)
    recorded = {row["step"] for row in manifest["learners"].values()}
    assert len(recorded) == 1 and 11 < recorded.pop() < steps
    assert complete_cuts(folder / "syncer") == ["c1"] and not manifest["without"]

    restored = [Model(90 + i, optimizer) for i in range(learners)]
    again = Run(folder, settings, steps, restored, cut="c1")
    assert again.execute() == "finished"
    for mine, theirs in zip(restored, undisturbed, strict=True):
        assert_equal(values(mine), values(theirs))
    assert len(digests(whole, rounds)) == rounds
    assert digests(again, rounds) == digests(whole, rounds)
    if algorithm["fragments"] == 1:  # nothing is left to hand in
        assert_equal(theta_of(again), theta_of(whole))
    start = [event for event in again.tape() if event["event"] == "syncer_start"][-1]
    assert start["restored_from"] == "c1"


def test_without_waiting_the_restored_run_ends_with_an_exact_ledger(tmp_path) -> None:
    settings = config(2, wait="never", fragments=2, sync_every=6, quorum=1)
    modules = [Model(7), Model(7)]
    manifest = cut_and_throw_away(tmp_path, settings, 50_000, modules, at_step=20)
    steps = 40 + max(row["step"] for row in manifest["learners"].values())
    again = Run(tmp_path, settings, steps, [Model(90), Model(91)], cut="c1")
    assert again.execute() == "finished"
    tape = again.tape()
    start = [i for i, event in enumerate(tape) if event["event"] == "syncer_start"][-1]
    joins = [event for event in tape[start:] if event["event"] == "join"]
    assert {join["learner"]: join["former"] for join in joins} == {
        name: row["incarnation"] for name, row in manifest["learners"].items()
    }
    ledgers = [event for event in tape[start:] if event["event"] == "ledger"]
    assert len(ledgers) == 2
    for row in [row for ledger in ledgers for row in ledger["fragments"]]:
        assert row["processed"] == 4 * steps == row["merged"] + row["lost"]
        assert row["pending"] == 0
