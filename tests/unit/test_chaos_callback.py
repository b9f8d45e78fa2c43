"""Faults in a learner's process: at its step, on order, once over its lives; nothing is killed."""

import os
import signal
from types import SimpleNamespace

import pytest
import torch

from dd_lightning.chaos.callback import HUGE, FaultCallback, poison
from dd_lightning.chaos.plan import FaultPlan, RunShape
from dd_lightning.chaos.records import DONE, ORDERS, NewRows, append

pytestmark = pytest.mark.unit

STEP_S = 0.1


class Life:
    """One life of learner 1: makes steps of STEP_S on a clock of its own."""

    def __init__(self, folder, *faults, max_steps=1000, checkpoint=True, **values):
        if checkpoint:
            (folder / "syncer").mkdir(exist_ok=True)
            (folder / "syncer" / "step-1-9.ckpt").touch()
        plan = FaultPlan.load(
            {"name": "test", "faults": list(faults), **values},
            RunShape(learners=("0", "1"), max_steps=max_steps, step_floor_s=STEP_S),
        )
        self.now_s, self.step, self.killed = 0.0, 0, []
        self.model = torch.nn.Linear(2, 2)
        self.own = folder / "learners" / "1"
        self.callback = FaultCallback(
            plan, "1", folder, lambda: self.now_s, self._sleep, lambda *a: self.killed.append(a)
        )

    def _sleep(self, seconds):
        self.now_s += seconds

    def run(self, steps):
        """Durations of so many steps."""
        found = []
        for _ in range(steps):
            began = self.now_s
            self.step += 1
            self.now_s += STEP_S
            trainer = SimpleNamespace(global_step=self.step)
            self.callback.on_train_batch_end(trainer, self.model)
            found.append(self.now_s - began)
        return found

    def rows(self):
        return [
            (row["number"], row["kind"], row["step"], row["asks"])
            for row in NewRows(self.own / DONE).read()
        ]


def test_a_kill_fires_at_its_step_and_not_again_in_the_next_life(tmp_path):
    fault = {"kind": "kill", "target": 1, "at_step": 5}
    first = Life(tmp_path, fault)
    first.run(4)
    assert first.killed == [] and first.rows() == []
    first.run(1)
    assert first.killed == [(os.getpid(), signal.SIGKILL)]
    assert first.rows() == [(0, "kill", 5, False)]  # written before it happened
    second = Life(tmp_path, fault)
    second.run(10)
    assert second.killed == []


def test_it_is_written_down_before_it_happens(tmp_path):
    life = Life(tmp_path, {"kind": "kill", "target": 1, "at_step": 1})
    life.callback._kill = lambda *_: life.killed.append(life.rows())
    life.run(1)
    assert life.killed == [[(0, "kill", 1, False)]]


def test_a_fault_of_another_learner_is_not_ours(tmp_path):
    life = Life(tmp_path, {"kind": "kill", "target": 0, "at_step": 5})
    life.run(10)
    assert life.killed == [] and life.rows() == []


def test_what_the_launcher_is_to_do_at_our_step_is_asked_for_once(tmp_path):
    faults = [
        {"kind": "kill_syncer", "at_learner": 1, "at_step": 3},
        {"kind": "partition", "target": 1, "at_step": 4},
        {"kind": "kill", "target": 0, "at_learner": 1, "at_step": 4},
    ]
    life = Life(tmp_path, *faults)
    life.run(8)
    assert life.killed == []
    expected = [(0, "kill_syncer", 3, True), (1, "partition", 4, True), (2, "kill", 4, True)]
    assert life.rows() == expected


def test_a_fault_waits_for_the_syncer_s_first_checkpoint(tmp_path):
    life = Life(tmp_path, {"kind": "kill", "target": 1, "at_step": 2}, checkpoint=False)
    life.run(5)
    assert life.killed == []
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer" / "step-1-0.ckpt").touch()  # of the initial values
    life.run(5)
    assert life.killed == []
    (tmp_path / "syncer" / "step-1-4.ckpt").touch()
    life.run(1)
    assert life.rows() == [(0, "kill", 11, False)]


def test_a_fault_with_too_few_steps_left_does_not_fire(tmp_path):
    fault = {"kind": "kill", "target": 1, "at_step": 20}
    life = Life(tmp_path, fault, max_steps=100, min_left_s=7.5, checkpoint=False)
    life.run(26)  # 74 of 0.1 s are left
    (tmp_path / "syncer").mkdir()
    (tmp_path / "syncer" / "step-1-4.ckpt").touch()
    life.run(74)
    assert life.killed == [] and life.rows() == []


def test_slow_steps_take_so_many_times_their_time_and_then_do_not(tmp_path):
    life = Life(tmp_path, {"kind": "slow", "target": 1, "at_step": 5, "seconds": 2, "factor": 4})
    assert life.run(5) == pytest.approx([STEP_S] * 5)
    slow = life.run(5)
    assert slow == pytest.approx([4 * STEP_S] * 5)
    assert life.run(5) == pytest.approx([STEP_S] * 5)


def test_a_pause_is_of_the_own_process(tmp_path):
    paused = []
    waker = SimpleNamespace(poll=lambda: None)
    life = Life(tmp_path, {"kind": "pause", "target": 1, "at_step": 2, "seconds": 3})
    life.callback._stop = lambda pid, s: paused.append((pid, s)) or waker
    life.run(4)
    assert paused == [(os.getpid(), 3.0)]


def test_orders_are_carried_out_once(tmp_path):
    life = Life(tmp_path)
    append(life.own / ORDERS, {"number": 7, "kind": "poison", "options": {"values": "nan"}})
    life.run(1)
    assert all(parameter.isnan().all() for parameter in life.model.parameters())
    assert life.rows() == [(7, "poison", 1, False)]
    again = Life(tmp_path)
    again.run(2)
    assert all(parameter.isfinite().all() for parameter in again.model.parameters())


def test_poison_spares_what_is_frozen():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    poison(model, "huge")
    assert torch.equal(model.weight, before["weight"] * HUGE)
    assert torch.equal(model.bias, before["bias"])


def test_half_a_line_is_read_once_it_is_whole(tmp_path):
    file = tmp_path / ORDERS
    rows = NewRows(file)
    assert rows.read() == []
    file.write_text('{"number": 1}\n{"num')
    assert rows.read() == [{"number": 1}] and rows.read() == []
    with open(file, "a") as out:
        out.write('ber": 2}\n')
    assert rows.read() == [{"number": 2}]
