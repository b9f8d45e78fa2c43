"""The syncer dies at every named point; it is started again, and the run ends as if it had not.

Two learners train on as threads of this process. A plan names the point of each start in turn; the
last start has none. What must hold on disk then: `tests/crash_checks.py`.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dd_lightning.crash_points import SYNCER_POINTS
from tests.crash_checks import check_run, processed
from tests.crash_roles import STEPS, TOKENS, WAIT_S, Syncer, train

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*exists and is not empty"),
]

ARRIVALS = {  # the point's nth arrival, where the first says little
    "tape.half_row": 40,
    "join.admitted": 2,
    "initial.received": 2,
    "merge.begun": 4,
    "merge.stepped": 4,
    "merge.done": 4,
    "merge.booked": 4,
    "merge.told": 4,
    "checkpoint.asked": 2,
    "checkpoint.copied": 2,
    "checkpoint.half_written": 2,
    "checkpoint.written": 2,
    "checkpoint.synced": 2,
    "checkpoint.renamed": 2,
    "checkpoint.told": 2,
}
OFTEN = {  # in the default suite, of each kind of state one
    "lock.epoch_partial",
    "start.tape_opened",
    "tape.half_row",
    "initial.received",
    "merge.stepped",
    "merge.booked",
    "checkpoint.half_written",
    "checkpoint.renamed",
    "end.before_last_checkpoint",
    "end.before_run_end",
}


def plan(point: str) -> list[str]:
    """Starts fail at these points in turn."""
    if point.startswith(("lock.", "start.")):  # at the first start, and at one in the middle
        return [point, "merge.told:3", point]
    return [f"{point}:{ARRIVALS.get(point, 1)}"]


PLANS = [
    *(pytest.param(plan(p), id=p, marks=() if p in OFTEN else pytest.mark.slow)
      for p in SYNCER_POINTS),
    # before any checkpoint is there to resume from, and again before the next
    pytest.param(["checkpoint.half_written", "checkpoint.renamed:2"], id="no checkpoint yet"),
    pytest.param(["checkpoint.copied", "merge.told", "merge.stepped"], id="thrice in a row",
                 marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("plan", PLANS)
def test_the_syncer_dies_and_is_started_again(tmp_path, plan) -> None:
    run = Run(tmp_path)
    try:
        for number, points in enumerate([*plan, ""], start=1):
            run.start(number, points)
        run.wait()
    finally:
        run.stop()
    events = check_run(tmp_path, [points.partition(":")[0] for points in plan])
    assert sum(event["event"] == "run" for event in events) == 1
    for learner in "01":  # nobody else died: every token is accounted for
        assert processed(tmp_path, learner) == {STEPS * TOKENS}


class Run:
    """Starts of the syncer, and the learners from the first address on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.syncer: Syncer | None = None
        self._port = 0
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, number: int, points: str) -> None:
        """Start the syncer; with `points`, see it die."""
        self.syncer = Syncer(self.folder, number, points, self._port)
        said = self.syncer.said()
        if said and not self._threads:
            self._port = int(said["listening"].rpartition(":")[2])
            self._begin(said["listening"])
        if number > 1 and said:
            assert said["resumed"]["epoch"] >= 1
        if points:
            assert self.syncer.died(), f"{points} did not fire; {self._log(number)}"

    def _begin(self, address: str) -> None:
        for learner in "01":
            thread = threading.Thread(target=self._train, args=(learner, address), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _train(self, learner: str, address: str) -> None:
        try:
            train(self.folder, learner, address)
        except BaseException as error:
            self._errors.append(error)

    def wait(self) -> None:
        """Learners and the last syncer end by themselves."""
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a learner does not end"
        assert self._errors == []
        assert self.syncer is not None and not self.syncer.died()
        assert self.syncer.process.exitcode == 0

    def stop(self) -> None:
        """What a failed test leaves."""
        if self.syncer is not None and self.syncer.process.is_alive():
            self.syncer.kill()

    def _log(self, number: int) -> str:
        return (self.folder / f"syncer{number}.err").read_text()[-2000:]
