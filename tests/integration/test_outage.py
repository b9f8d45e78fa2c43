"""Two of three learners cut off: they train on, re-attach, and what they did is merged."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from dd_lightning.protocol.tape import read_tape
from tests.cut_link import ProxyThread, Trainers
from tests.syncer_process import END_S, Syncer, until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

NAMES, CUT = ("0", "1", "2"), ("0", "1")
RTT_S, STEP_S = 0.06, 0.02
BOUND_S = 2.0  # beyond a round trip
LEASE_S = 10.0
ATTEMPTS = 3  # a busy machine makes times longer, never shorter
SETTINGS = (
    "learners=3",
    "algorithm=short_run",
    "algorithm.fragments=2",
    "algorithm.sync_every=12",
    "algorithm.grace_cap=50",  # steps, which are short here beside a round trip
    "algorithm.max_stale=1000",  # they contribute first, however far the third has come
)


class Run:
    """A syncer's process, and its learners behind a proxy."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self.folder = folder / "run"
        self.syncer = Syncer(self.folder, *SETTINGS)
        stack.callback(self.syncer.kill)
        self.proxy = ProxyThread(self.folder, NAMES, {"rtt_ms": 1e3 * RTT_S, "mbit_s": 100})
        stack.callback(self.proxy.close)
        self.trainers = Trainers(self.proxy, NAMES, STEP_S)
        self._started = self.syncer.started_s()

    def of(self, kind: str, learner: str | None = None) -> list[dict[str, Any]]:
        """Events of the tape so far, `t_s` as a wall time."""
        events = list(read_tape(self.folder / "tape.jsonl"))
        return [
            event | {"t_s": self._started + event["t_s"]}
            for event in events
            if event["event"] == kind and learner in (None, event.get("learner"))
        ]

    def cut(self, seconds: float) -> tuple[float, float]:
        """Cut the two off; wall times of begin and end, once it is over."""
        began = self.proxy.order(CUT, do="cut", seconds=seconds)
        time.sleep(began + seconds - time.time())
        return began, began + seconds

    def first_after(self, learner: str, moment: float) -> dict[str, Any]:
        """The first contribution that was received from then on."""

        def found() -> list[dict[str, Any]]:
            return [e for e in self.of("contribution", learner) if e["t_s"] >= moment]

        until(lambda: bool(found()))
        return min(found(), key=lambda event: event["t_s"])

    def finish(self) -> None:
        self.trainers.finish()
        assert self.syncer.end(END_S) == 0


@pytest.fixture
def run(tmp_path):
    with contextlib.ExitStack() as stack:
        started = Run(tmp_path, stack)
        until(lambda: len(started.of("merge")) >= 8)
        until(lambda: {e["learner"] for e in started.of("contribution")} == set(NAMES))
        yield started


@pytest.mark.parametrize("seconds", [5.0, pytest.param(20.0, marks=pytest.mark.slow)])
def test_two_learners_are_cut_off_and_nothing_of_their_work_is_lost(run, seconds) -> None:
    retransmitted_s = tcp_tries_again(seconds) - seconds
    for attempt in range(ATTEMPTS):
        before = {name: run.trainers.steps(name) for name in CUT}
        generations = {name: len(run.of("join", name)) for name in NAMES}
        began, back = run.cut(seconds)
        for name in CUT:  # they trained on
            assert run.trainers.steps(name) - before[name] > 0.3 * seconds / STEP_S
        assert any(began + 1 < merge["t_s"] < back for merge in run.of("merge")), "nobody waited"
        firsts = {name: run.first_after(name, back) for name in CUT}
        after_s = [first["t_s"] - back for first in firsts.values()]
        print(f"after {seconds:g} s: {after_s}; TCP's next try {retransmitted_s:.1f} s")
        if max(after_s) <= BOUND_S + RTT_S:
            break
        assert attempt < ATTEMPTS - 1, f"first contributions only {after_s} s after the return"
    assert max(after_s) < 0.7 * retransmitted_s
    for name, first in firsts.items():
        assert first["steps"] > 0.3 * seconds / STEP_S
        again = run.of("join", name)[generations[name] :]
        assert [(one["cause"], one["continues"]) for one in again] == [("re-attach", True)]
        lost = run.of("dead", name)[-1]
        lease = "no word" in lost["cause"]
        assert lease == (seconds > LEASE_S)
        if lease:
            assert lost["t_s"] < began + LEASE_S + 0.2 * seconds
    # the bytes that TCP held come through now: they are fenced, nobody joins again
    time.sleep(max(0.0, back + retransmitted_s + 1 - time.time()))
    run.finish()
    for name in NAMES:
        assert len(run.of("join", name)) == generations[name] + (name in CUT)
        ledger = run.of("ledger", name)[-1]
        for row in ledger["fragments"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
    for name in CUT:
        what_was_trained_in_the_outage_is_accounted(run, name, generations[name] + 1, seconds)


def what_was_trained_in_the_outage_is_accounted(
    run: Run, learner: str, generation: int, seconds: float
) -> None:
    """It is merged; a fragment whose contribution missed the grace window has it as `absent`."""
    whole = 0.3 * seconds / STEP_S
    since = [one for one in run.of("contribution", learner) if one["generation"] == generation]
    held = [one for one in since if one["steps"] > whole]
    merged = {one["fragment"] for one in held if one["verdict"] == "accepted"}
    assert merged, held
    lost = [event for event in run.of("lost", learner) if event["cause"] == "absent"]
    large = {event["fragment"] for event in lost if event["tokens"] > 0.9 * held[0]["tokens"]}
    assert merged | large == {0, 1}


def tcp_tries_again(outage_s: float) -> float:
    """When a connection that lived through it is used again: 0.3 s * (2^k - 1) after its begin."""
    tried = timeout = 0.3
    while tried < outage_s:
        timeout *= 2
        tried += timeout
    return tried
