"""`mode=simulate` with faults: the plans, records and outcomes of real processes, repeatably."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from dd_lightning.protocol.tape import read_tape
from tests.chaos_runs import FaultyRun, assert_accounted
from tests.simulated_runs import Silent, prepare, settings_of, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays 60 steps of 50 ms of two learners with overrides."""
    data = tmp_path_factory.mktemp("data")

    def run(*overrides):
        folder = tmp_path_factory.mktemp("run")
        simulate(data, folder, "trainer.max_steps=60", *overrides)
        return FaultyRun(folder, "")

    run.data = data
    return run


def test_a_killed_learner_rejoins_under_a_new_generation_with_its_own_checkpoint(play):
    run = play("chaos=kill_learner", "chaos.at_step=20")
    assert_accounted(run, "kill_learner")
    (fault,) = run.fired()
    assert fault["fired"] == pytest.approx(1.0) and fault["planned"] == {"step": 20}
    (dead,) = run.of("dead", learner="1")
    first, second = run.of("join", learner="1")
    assert dead["t_s"] == pytest.approx(fault["fired"])
    assert first["generation"] < second["generation"]
    # found dead at the launcher's next look, a tenth of a second later; back 0.5 s after that
    assert second["t_s"] == pytest.approx(1.6, abs=0.01)
    assert second["state_from"] == "checkpoint" and second["data_position"] == 20
    assert first["incarnation"] != second["incarnation"]
    assert any(one["t_s"] > second["t_s"] for one in run.of("contribution", learner="1"))


def test_a_killed_syncer_resumes_in_a_new_epoch_and_learners_train_on_meanwhile(play):
    run = play("chaos=kill_syncer", "chaos.at_step=20")
    assert_accounted(run, "kill_syncer")
    begun = run.of("syncer_start")
    assert [one["epoch"] for one in begun] == [1, 2]
    assert sum(number for _, number in begun[1]["versions"]) > 0  # of its checkpoint
    again = [one for one in run.of("join") if one["t_s"] >= begun[1]["t_s"]]
    assert [one["cause"] for one in again] == ["re-attach"] * 2
    assert run.summary["seconds"] == pytest.approx(3.0)  # 60 steps of 50 ms: nobody waited
    assert run.summary["uptime"] == pytest.approx(1.0)


def test_a_pause_longer_than_the_lease_is_a_loss_and_a_return(play):
    run = play(
        "simulate.step_s=0.2",
        "chaos=pause_learner",
        "chaos.at_step=15",
        "chaos.seconds=6",
        "timeouts.lease=4",
        "timeouts.heartbeat=1",
    )
    assert_accounted(run, "pause_learner")
    (fault,) = run.fired()
    assert fault["until"] == pytest.approx(fault["fired"] + 6)
    dead = run.of("dead", learner="1")[0]
    assert fault["fired"] + 2 < dead["t_s"] < fault["until"]
    back = run.of("join", learner="1")[1]
    assert back["cause"] == "re-attach" and back["t_s"] == pytest.approx(fault["until"], abs=0.5)
    quiet = [c for c in run.of("contribution", learner="1") if dead["t_s"] < c["t_s"] < back["t_s"]]
    assert not quiet
    left = {one["learner"]: one["t_s"] for one in run.of("leave")}
    assert left["1"] == pytest.approx(60 * 0.2 + 6, abs=0.5)


def test_a_process_paused_in_the_middle_of_a_step_goes_on_with_the_rest_of_it(play):
    run = play("chaos=plan", "chaos.faults=[{kind: pause, target: 1, at_s: 1.02, seconds: 0.5}]")
    assert_accounted(run, "plan")
    ends = {one["learner"]: one["t_s"] for one in run.of("leave")}
    assert ends["1"] == pytest.approx(60 * 0.05 + 0.5, abs=0.01)


def test_slow_steps_are_virtual_too(play):
    run = play("chaos=slow_learner", "chaos.at_step=20", "chaos.seconds=1")
    assert_accounted(run, "slow_learner")
    # the second at a quarter of the speed cost 0.75 s
    slow = run.summary["per_learner"]["1"]["seconds_stepping"]
    fast = run.summary["per_learner"]["0"]["seconds_stepping"]
    assert fast == pytest.approx(3.0) and slow == pytest.approx(3.75)
    left = {one["learner"]: one["t_s"] for one in run.of("leave")}
    assert left["1"] == pytest.approx(3.75, abs=0.01)


def test_poison_is_refused_and_its_learner_heals(play):
    run = play("chaos=poison_nan", "chaos.at_step=20")
    assert_accounted(run, "poison_nan")
    verdicts = run.verdicts("1")
    first = verdicts.index("non-finite")
    assert "accepted" in verdicts[first:] and set(run.verdicts("0")) == {"accepted"}


def test_huge_contributions_are_refused_by_their_norm_and_their_learner_heals(play):
    run = play("chaos=poison_huge", "learners=4", "chaos.at_step=15", "trainer.max_steps=36")
    assert_accounted(run, "poison_huge")
    verdicts = run.verdicts("1")
    assert "accepted" in verdicts[verdicts.index("norm") :]
    assert set(run.verdicts("0")) == {"accepted"}


def test_a_full_disk_costs_checkpoints_only(play):
    run = play("chaos=full_disk", "chaos.at_step=20", "chaos.seconds=1")
    assert_accounted(run, "full_disk")
    texts = [one["text"] for one in run.of("warning")]
    assert any("No space left on device" in text and "0.0 MiB are free" in text for text in texts)
    (fault,) = run.fired()
    times = [one["t_s"] for one in run.of("checkpoint")]
    assert not [t for t in times if fault["fired"] < t < fault["until"]]
    assert [t for t in times if t > fault["until"]]


def test_learners_join_late_and_leave_by_schedule(play):
    run = play(
        "algorithm.max_learners=3", "simulate.joins={1: 1, 2: 1.5}", "simulate.leaves={0: 1.8}"
    )
    joins = {one["learner"]: one for one in run.of("join")}
    assert [joins[name]["t_s"] for name in "012"] == [0.0, 1.0, 1.5]
    assert joins["2"]["planned"] is False and joins["2"]["state_from"] == "peer"
    leave = run.of("leave", learner="0")[0]
    assert leave["t_s"] == pytest.approx(1.8, abs=0.06) and "SIGTERM" in leave["cause"]
    assert (run.folder / "learners" / "0" / "checkpoints" / "last.ckpt").exists()
    assert not run.of("dead") and run.summary["status"] == "finished"


@contextlib.contextmanager
def busy(processes):
    """So many processes of ours that spin."""
    spinning = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)
    ]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


FAULTS = (
    "chaos.faults=[{kind: kill, target: 1, at_step: 20}, "
    "{kind: pause, target: 0, at_s: 1.2, seconds: 0.3}, {kind: kill_syncer, at_s: 1.9}, "
    "{kind: partition, target: 1, at_s: 3.1, seconds: 0.4}]"
)


@pytest.mark.parametrize(
    ("kind", "plan", "spinning"),
    [("plan", (FAULTS,), 2), ("poisson", ("chaos.poisson.per_run=5", "chaos.seed=3"), 0)],
)
def test_the_same_seed_repeats_every_fault_also_beside_busy_cores(play, kind, plan, spinning):
    settings = (f"chaos={kind}", *plan, "network=us_eu", "trainer.max_steps=80")
    one = play(*settings)
    with busy(spinning):
        two = play(*settings)
    assert_accounted(one, kind)
    actions = {fault["action"] for fault in one.fired()}
    assert actions >= ({"kill", "kill_syncer"})
    assert kind == "poisson" or len(actions) == 4
    names = ["tape.jsonl", "faults.jsonl", "summary.json"]
    names += [
        str(path.relative_to(one.folder)) for path in one.folder.glob("learners/*/faults.jsonl")
    ]
    for name in names:
        assert (one.folder / name).read_bytes() == (two.folder / name).read_bytes(), name
    assert one.summary["parameters_sha256"] == two.summary["parameters_sha256"]


def test_ctrl_c_ends_it_with_its_summary(play, tmp_path):
    pressed = []

    def press():
        if run.time.now >= 1.0 and not pressed:
            pressed.append(run.time.now)
            os.kill(os.getpid(), signal.SIGINT)

    settings = settings_of(play.data, "trainer.max_steps=100000", "learners=3")
    run = prepare(settings, tmp_path, Silent(press))
    outcome = run.execute()
    assert outcome.status == "interrupted" and pressed
    found = FaultyRun(tmp_path, "")
    assert found.summary["status"] == "interrupted"
    assert [one["cause"][:7] for one in found.of("leave")] == ["SIGTERM"] * 3
    assert all(one["t_s"] < pressed[0] + 0.5 for one in read_tape(tmp_path / "tape.jsonl"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("simulate.restart_s=-1", "simulate.restart_s is -1"),
        ("simulate.joins={2: 1}", "simulate.joins has learner '2'"),
        ("simulate.joins=[1]", "simulate.joins is"),
        ("simulate.leaves={1: [1, 2]}", "simulate.leaves.1 is 2 s, when the learner is not there"),
        ("launcher.resume=last", "launcher.resume is 'last'"),
    ],
)
def test_wrong_settings_are_refused_by_name(play, tmp_path, change, said):
    with pytest.raises(ValueError, match=said.replace("[", r"\[")):
        prepare(settings_of(play.data, change), tmp_path, Silent())
