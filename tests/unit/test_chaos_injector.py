"""The launcher's side of chaos, on a made-up table of processes and a clock of the test's."""

import json
import signal
from collections import Counter
from types import SimpleNamespace

import pytest

from dd_lightning.chaos.injector import Injector
from dd_lightning.chaos.plan import FaultPlan, RunShape
from dd_lightning.chaos.records import DONE, ORDERS, NewRows, append
from dd_lightning.launch import chaos as launch

pytestmark = pytest.mark.unit

SHAPE = RunShape(
    learners=("0", "1"), max_steps=1000, step_floor_s=0.1, first_checkpoint_s=5.0, seed=3
)
WALL_S = 5000.0  # wall time when the run's clock stands at 0


class Table:
    """Processes by role, what was done to them, and the run's clock."""

    def __init__(self):
        self.pids = {"syncer": 1, "learner 0": 10, "learner 1": 11}
        self.signals, self.commands, self.disk = [], [], []
        self.has_proxy, self.now_s = True, 0.0
        self.paused, self.resumed = [], 0

    def pid(self, role):
        return self.pids.get(role)

    def signal(self, role, number):
        self.signals.append((role, number))

    def pause(self, role, seconds):
        self.paused.append((role, seconds))

    def resume(self):
        self.resumed += 1

    def proxy(self, command):
        self.commands += [dict(command)] if self.has_proxy else []
        return self.has_proxy

    def fill(self):
        self.disk.append("full")

    def free(self):
        self.disk.append("free")


@pytest.fixture
def table():
    return Table()


@pytest.fixture
def make(tmp_path, table):
    def injector(*faults, checkpoint=True, shape=SHAPE, **values):
        if checkpoint:
            write_checkpoint(tmp_path)
        plan = FaultPlan.load({"name": "test", "faults": list(faults), **values}, shape)
        return Injector(plan, tmp_path, table, table, lambda: WALL_S + table.now_s)

    return injector


def write_checkpoint(folder, merges=12):
    (folder / "syncer").mkdir(exist_ok=True)
    (folder / "syncer" / f"step-1-{merges}.ckpt").touch()


def poll(injector, table, *times):
    for now_s in times:
        table.now_s = now_s
        injector.poll(now_s)


def test_a_kill_at_its_time_fires_once(make, table):
    injector = make({"kind": "kill", "target": 1, "at_s": 3.0})
    poll(injector, table, 1.0, 2.9)
    assert table.signals == [] and injector.unfired() == ["kill of learner 1 at 3 s"]
    poll(injector, table, 3.1, 3.2, 9.0)
    assert table.signals == [("learner 1", signal.SIGKILL)] and injector.unfired() == []
    (row,) = injector.faults()
    assert row["kind"] == "test" and row["action"] == "kill" and row["target"] == "1"
    assert (row["planned"], row["fired"], row["t_s"], row["until"]) == (
        {"t_s": 3.0},
        3.1,
        3.1,
        None,
    )


def test_nothing_fires_before_the_first_checkpoint_of_merged_work(make, table, tmp_path):
    injector = make({"kind": "kill_syncer", "at_s": 3.0}, checkpoint=False)
    write_checkpoint(tmp_path, merges=0)
    poll(injector, table, 3.0, 5.0)
    assert table.signals == []
    write_checkpoint(tmp_path)
    poll(injector, table, 5.1)
    assert table.signals == [("syncer", signal.SIGKILL)]


def test_a_fault_with_too_few_steps_left_never_fires(make, table, tmp_path):
    injector = make({"kind": "kill", "target": 1, "at_s": 3.0}, min_left_s=30)
    write_status(tmp_path, t_s=80.0, steps={"0": 600, "1": 701})  # of 1000 steps of 0.1 s
    poll(injector, table, 80.0)
    assert table.signals == [] and len(injector.unfired()) == 1
    (row,) = injector.faults(90.0)
    assert (row["fired"], row["t_s"], row["why"]) == (None, 90.0, "its moment did not come")


def write_status(folder, t_s, steps):
    status = {"t_s": t_s, "learners": {name: {"step": step} for name, step in steps.items()}}
    (folder / "syncer").mkdir(exist_ok=True)
    (folder / "syncer" / "status.json").write_text(json.dumps(status))


def test_a_target_that_is_away_is_waited_for(make, table):
    injector = make({"kind": "kill", "target": 1, "at_s": 3.0})
    del table.pids["learner 1"]
    poll(injector, table, 3.0, 4.0)
    assert table.signals == []
    table.pids["learner 1"] = 12
    poll(injector, table, 5.0)
    assert injector.faults()[0]["fired"] == 5.0


def test_a_pause_ends_by_itself_or_with_the_run(make, table):
    injector = make({"kind": "pause", "target": 0, "at_s": 2, "seconds": 4})
    poll(injector, table, 2.0)
    assert table.paused == [("learner 0", 4.0)] and injector.faults()[0]["until"] == 6.0
    injector.close()
    assert table.resumed == 1


def test_children_that_are_paused_go_on_with_the_end_of_the_run(monkeypatch):
    stopped, went_on = [], []

    class Waker:
        def kill(self):
            pass

        def wait(self):
            pass

    monkeypatch.setattr(launch, "pause", lambda pid, s: stopped.append((pid, s)) or Waker())
    monkeypatch.setattr(launch, "resume", went_on.append)
    child = SimpleNamespace(pid=10, exit_code=lambda: None)
    children = launch.Children({"learner 0": child}.get)
    children.pause("learner 0", 4.0)
    children.pause("learner 1", 4.0)  # not there
    assert stopped == [(10, 4.0)]
    children.resume()
    children.resume()
    assert went_on == [10]


@pytest.mark.parametrize(
    ("fault", "command"),
    [
        ({"kind": "partition", "seconds": 7}, {"do": "cut", "seconds": 7}),
        ({"kind": "flap"}, {"do": "cut", "seconds": 0.5, "times": 5, "every_s": 1.5}),
        ({"kind": "bandwidth"}, {"do": "throttle", "seconds": 5, "share": 0.001}),
        ({"kind": "corrupt", "flips": 3}, {"do": "corrupt", "seconds": 2, "flips": 3}),
    ],
)
def test_faults_of_the_network_are_the_proxy_s(make, table, fault, command):
    injector = make({"target": 1, "at_s": 1, **fault})
    table.has_proxy = False
    poll(injector, table, 1.0)
    assert injector.unfired()
    table.has_proxy = True
    poll(injector, table, 2.0)
    assert table.commands == [{"learner": "1", **command}]
    assert injector.faults()[0]["until"] > 2.0


def test_a_full_disk_is_freed_after_its_time_and_at_the_end(make, table, monkeypatch):
    monkeypatch.setattr("dd_lightning.chaos.plan._may_mount", lambda: True)
    disk = {"kind": "full_disk", "seconds": 2}
    injector = make({**disk, "at_s": 1}, {**disk, "at_s": 5})
    poll(injector, table, 1.0, 2.0)
    assert table.disk == ["full"]
    poll(injector, table, 3.0, 5.0)
    assert table.disk == ["full", "free", "full"]
    injector.close()
    assert table.disk[-1] == "free" and injector.unfired() == []


def test_what_a_learner_did_and_asks_for_at_its_step(make, table, tmp_path):
    own = tmp_path / "learners" / "1" / DONE
    injector = make(
        {"kind": "kill", "target": 1, "at_step": 50},
        {"kind": "kill_syncer", "at_learner": 1, "at_step": 50},
        {"kind": "partition", "target": 0, "at_learner": 1, "at_step": 60},
    )
    append(own, {"number": 0, "kind": "kill", "step": 50, "wall_s": WALL_S + 8, "asks": False})
    append(own, {"number": 1, "kind": "kill_syncer", "step": 50, "wall_s": 0, "asks": True})
    poll(injector, table, 8.5, 8.6)
    assert table.signals == [("syncer", signal.SIGKILL)]  # the learner has killed itself
    fired = {row["number"]: row["fired"] for row in injector.faults()}
    assert fired == {0: pytest.approx(8.0), 1: 8.5, 2: None}


def test_what_only_the_learner_can_do_is_ordered_and_counts_once_it_did(make, table, tmp_path):
    injector = make({"kind": "slow", "target": 1, "at_s": 2, "factor": 3})
    poll(injector, table, 2.0, 2.1)
    orders = NewRows(tmp_path / "learners" / "1" / ORDERS).read()
    assert orders == [{"number": 0, "kind": "slow", "options": {"seconds": 5, "factor": 3.0}}]
    assert injector.unfired()
    row = {"number": 0, "kind": "slow", "step": 9, "wall_s": WALL_S + 2.1, "asks": False}
    append(tmp_path / "learners" / "1" / DONE, row)
    poll(injector, table, 2.2)
    assert injector.unfired() == [] and injector.faults()[0]["fired"] == pytest.approx(2.1)


def test_a_launcher_that_goes_on_with_a_run_fires_nothing_again(make, table):
    fault = {"kind": "kill", "target": 1, "at_s": 3.0}
    poll(make(fault), table, 3.0)
    again = make(fault)
    poll(again, table, 4.0)
    assert len(table.signals) == 1 and again.unfired() == [] and again.faults() == []


def test_a_poisson_process_begins_at_the_checkpoint_and_leaves_its_time(make, table, tmp_path):
    drawn = {"mean_s": 2.0, "faults": [{"kind": "kill"}, {"kind": "kill_syncer"}]}
    injector = make(poisson=drawn, min_left_s=20, checkpoint=False)
    for now_s in range(1, 100):
        if now_s == 10:
            write_checkpoint(tmp_path)
        write_status(tmp_path, now_s, dict.fromkeys("01", 10 * now_s))  # done at 100 s
        poll(injector, table, float(now_s))
    rows = injector.faults()
    times = [row["fired"] for row in rows]
    assert times[0] > 10 and 70 < times[-1] <= 80
    assert 20 < len(rows) < 55 and len(table.signals) == len(rows)  # 35 are expected
    assert Counter(row["target"] for row in rows).keys() == {"0", "1", "syncer"}
    assert rows[0]["planned"] == {"poisson": 2.0}
    assert injector.unfired() == [] and not injector.drew_none


def test_a_scaled_process_ends_with_its_window_whoever_steps_again(make, table, tmp_path):
    """The faults that were printed before the start, and no more."""
    shape = RunShape(learners=("0",), max_steps=100, step_floor_s=0.1, seed=3)
    injector = make(poisson={"per_run": 50, "faults": [{"kind": "kill"}]}, shape=shape)
    write_status(tmp_path, 0.0, {"0": 0})
    for now_s in range(1, 60):
        write_status(tmp_path, float(now_s), {"0": 10 * now_s % 80})  # its window is 10 s
        poll(injector, table, float(now_s))
    (line,) = injector._plan.describe()
    assert line.count("kill of learner 0 at") == len(injector.faults()) > 30
    assert max(row["fired"] for row in injector.faults()) <= 15


def test_a_poisson_process_stands_still_while_nobody_steps(make, table, tmp_path):
    """A mean below what a restart takes would else kill whoever is back, for ever."""
    injector = make(poisson={"mean_s": 1.0, "faults": [{"kind": "kill_syncer"}]})
    write_status(tmp_path, 0.0, {"0": 0, "1": 0})
    poll(injector, table, *range(1, 200))
    assert len(table.signals) <= 5  # 3 s, which a report may be late
    for now_s in range(200, 220):
        write_status(tmp_path, float(now_s), {"0": 10 * (now_s - 199), "1": 0})  # one is enough
        poll(injector, table, float(now_s))
    assert 10 <= len(table.signals) <= 35


def test_a_poisson_fault_whose_target_is_away_is_told_and_not_made_up_for(make, table):
    injector = make(poisson={"mean_s": 1.0, "faults": [{"kind": "kill", "target": 1}]})
    table.pids = {}
    poll(injector, table, *range(20))
    assert table.signals == [] and injector.drew_none
    assert {row["why"] for row in injector.faults()} == {"its target was away"}
    assert {row["fired"] for row in injector.faults()} == {None}


def test_without_a_step_floor_measured_steps_scale_the_process(make, table, tmp_path):
    shape = RunShape(learners=("0",), max_steps=400)
    injector = make(poisson={"per_run": 3, "faults": [{"kind": "kill"}]}, shape=shape)
    poll(injector, table, 1.0)
    assert injector._drawn is None  # nothing is measured yet
    write_status(tmp_path, 10.0, {"0": 0})
    poll(injector, table, 10.0)
    write_status(tmp_path, 20.0, {"0": 100})
    poll(injector, table, 20.0)
    assert injector._next[1].planned == {"poisson": pytest.approx(10.0)}  # 300 steps of 0.1 s


@pytest.fixture
def ended(tmp_path, table):
    """(events, problems, what was said) of a plan whose run is over before anything of it fired."""

    def end(whole, **values):
        plan, said = FaultPlan.load({"name": "test", **values}, SHAPE), []
        chaos = launch.RunChaos(plan, tmp_path, table, said.append, table, lambda: table.now_s)
        chaos.poll()
        return *chaos.end(whole), said

    return end


@pytest.mark.parametrize("when", [{"at_s": 50}, {"at_step": 700}])
def test_a_planned_fault_that_did_not_fire_fails_a_whole_run_only(ended, when):
    fault = {"kind": "kill", "target": 1, **when}
    (row,), (problem,), _ = ended(True, faults=[fault])
    assert row["event"] == "fault" and row["fired"] is None
    assert problem.startswith("chaos test: a planned fault did not fire: kill of learner 1")
    assert ended(False, faults=[fault])[1] == []  # it was interrupted, or has failed anyway


def test_a_poisson_process_that_drew_none_says_so_and_fails_nothing(ended):
    (warning,), problems, said = ended(True, poisson={"mean_s": 9.0, "faults": [{"kind": "kill"}]})
    assert (problems, warning["event"]) == ([], "warning")
    assert warning["text"] == "chaos test: the Poisson process drew no fault"
    assert said == [f"warning: {warning['text']}"]
