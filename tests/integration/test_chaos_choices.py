"""Every choice of `conf/chaos` in a smoke run of real processes (slow: `make test-all`)."""

from pathlib import Path

import pytest

import dd_lightning.conf as conf
from dd_lightning.chaos.plan import _may_mount
from tests.chaos_runs import RUN_TIMEOUT_S, assert_survived, run_with

pytestmark = [
    pytest.mark.integration,
    pytest.mark.slow,
    pytest.mark.timeout(RUN_TIMEOUT_S + 20),
]

NO_FAULT = ("none", "plan")  # nothing is planned in these files
OWN_TEST = ("kill_learner", "poisson_often")  # test_chaos_kill.py; the bench of failures
CHOICES = sorted(path.stem for path in (Path(conf.__file__).parent / "chaos").glob("*.yaml"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def run(tmp_path, data):
    """Runs a choice and checks what holds after any fault."""

    def start(choice, *overrides):
        found = run_with(tmp_path / "run", data, f"chaos={choice}", *overrides)
        assert_survived(found, choice)
        return found

    return start


def test_every_choice_has_a_test():
    tested = {name.removeprefix("test_after_") for name in globals() if "test_after_" in name}
    assert set(CHOICES) == tested | {*NO_FAULT, *OWN_TEST}


def assert_reattached(run):
    """Learner 1 was known lost, and its process came back under a new generation."""
    first, second, *_ = run.of("join", learner="1")
    assert second["generation"] > first["generation"] and second["cause"] == "re-attach"
    assert second["continues"] and second["incarnation"] == first["incarnation"]
    after = [c for c in run.of("contribution", learner="1") if c["t_s"] > second["t_s"]]
    assert "accepted" in {one["verdict"] for one in after}


def lost_for_its_lease(run, choice):
    found = run(choice)
    (fault,), dead = found.fired(), found.of("dead", learner="1")[0]
    assert dead["cause"].startswith("no word") and dead["t_s"] > fault["fired"]
    assert_reattached(found)


def test_after_pause_learner(run):
    lost_for_its_lease(run, "pause_learner")


def test_after_partition(run):
    lost_for_its_lease(run, "partition")


def test_after_slow_learner(run):
    found = run("slow_learner")
    assert found.of("dead") == []
    slow = found.summary["per_learner"]["1"]
    assert slow["step_seconds_p99"] > 2 * slow["step_seconds_p50"]


def test_after_flap(run):
    found = run("flap")
    (fault,) = found.fired()
    assert fault["until"] - fault["fired"] == pytest.approx(6.5)


def test_after_bandwidth_collapse(run):
    found = run("bandwidth_collapse")
    assert "accepted" in found.verdicts("1")[-5:]


def test_after_corrupt(run):
    """What was flipped has ended the session or been refused by its checksum."""
    found = run("corrupt")
    (fault,) = found.fired()
    refused = [c for c in found.of("contribution") if c["verdict"] == "checksum"]
    dead = found.of("dead", learner="1", cause="connection closed")
    assert refused or (dead and dead[0]["t_s"] >= fault["fired"])
    assert "accepted" in found.verdicts("1")[-5:]


def test_after_kill_syncer(run):
    found = run("kill_syncer")
    assert [start["epoch"] for start in found.of("syncer_start")] == [1, 2]
    joins = [join for join in found.of("join") if join["cause"] == "re-attach"]
    assert {join["learner"] for join in joins} == {"0", "1"}
    assert any(merge["epoch"] == 2 for merge in found.of("merge"))


@pytest.mark.skipif(not _may_mount(), reason="mounts a tmpfs: Linux and root")
def test_after_full_disk(run):
    found = run("full_disk")
    (fault,) = found.fired()
    said = [w["text"] for w in found.of("warning") if w["t_s"] > fault["fired"]]
    assert any("No space left" in text for text in said)
    assert any(e["t_s"] > fault["until"] for e in found.of("checkpoint"))
    assert str(found.folder) not in Path("/proc/mounts").read_text()
    assert list((found.folder / "syncer").glob("step-*.ckpt"))


def test_after_poison_nan(run):
    verdicts = run("poison_nan").verdicts("1")
    assert verdicts.count("non-finite") >= 3  # then it was told to reload
    assert verdicts[-1] != "non-finite" and "accepted" in verdicts[-5:]


def test_after_poison_huge(run):
    verdicts = run("poison_huge", "learners=4").verdicts("1")
    assert "norm" in verdicts and "accepted" in verdicts[-5:]


def test_after_poisson(run):
    found = run("poisson")
    assert {fault["action"] for fault in found.fired()} <= {"kill", "kill_syncer"}
    assert all(fault["planned"].keys() == {"poisson"} for fault in found.of("fault"))


def test_after_mixed(run):
    run("mixed", "learners=3")


def test_a_plan_of_one_s_own_and_a_fault_that_cannot_fire_fails_the_run(tmp_path, data):
    """The second one comes due when too little of the run is left."""
    faults = "[{kind: slow, target: 0, at_step: 150}, {kind: pause, target: 1, at_s: 3000}]"
    with pytest.raises(AssertionError, match="a planned fault did not fire: pause of learner 1"):
        run_with(tmp_path / "run", data, "chaos=plan", f"chaos.faults={faults}")
