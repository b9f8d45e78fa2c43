"""A simulated run without latency is, bit for bit, the run of real threads over real comm threads.

With dropout too: each learner draws its masks from random states of its own.
"""

from __future__ import annotations

import threading

import pytest

from dd_lightning.launch.learner import train
from dd_lightning.protocol.tape import read_tape
from dd_lightning.syncer.checkpoint import parameters_sha256
from tests.integration.test_simulate import simulate  # noqa: F401 (a fixture)
from tests.trainers import WAIT_S, run_threads
from tests.turns import InOrder, Turns

pytestmark = pytest.mark.integration

ADDRESS = "tcp://127.0.0.1:1"
LEARNERS = 3
# Of what each learner has left at the end, threads merge in the order in which they come to it.
SCHEDULES = {
    "whole": ["algorithm=diloco", "algorithm.fragments=1", "trainer.max_steps=12"],
    "streaming": ["algorithm=streaming", "algorithm.fragments=3", "trainer.max_steps=13"],
}


def by_threads(settings, folder, syncer, monkeypatch):
    """The same run with a thread per learner; the syncer in memory."""
    running = syncer(settings.syncer)
    turns, barrier = Turns(monkeypatch), threading.Barrier(LEARNERS)
    joined = [threading.Event() for _ in range(LEARNERS)]
    values = settings.values | {"launcher": settings.values["launcher"] | {"step_floor_s": 0.0}}

    def learner(index):
        def run():
            assert index == 0 or joined[index - 1].wait(WAIT_S)
            own = folder / str(index)
            own.mkdir()
            with turns.taken():
                order = InOrder(turns, joined[index], barrier)
                train(values, str(index), own, ADDRESS, callbacks=[order])

        return run

    run_threads(*(learner(index) for index in range(LEARNERS)))
    return running


def merges(events):
    """What was merged of whom, and what came of it."""
    keys = ("round", "fragment", "version", "contributors", "digest")
    return [{key: event.get(key) for key in keys} for event in events]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_latency_simulate_equals_threads(
    simulate,  # noqa: F811
    syncer,
    monkeypatch,
    tmp_path,
    schedule,
):
    overrides = [
        *(*SCHEDULES[schedule], "algorithm.sync_every=6"),
        *(f"learners={LEARNERS}", "task.module.gpt.dropout=0.2"),
    ]
    folder, summary = simulate(*overrides)
    running = by_threads(simulate.settings(*overrides), tmp_path, syncer, monkeypatch)
    tape = [event for event in read_tape(folder / "tape.jsonl") if event["event"] == "merge"]
    ours, theirs = merges(tape), merges(running.events("merge"))
    whole = 2 if schedule == "whole" else 6  # rounds, until some learner is done
    assert all(len(merge["contributors"]) == LEARNERS for merge in ours[:whole])
    assert ours[:whole] == theirs[:whole]
    if schedule == "whole":
        assert ours == theirs
        assert summary["parameters_sha256"] == parameters_sha256(running.parameters())
