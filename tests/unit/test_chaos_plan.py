"""Fault plans: what is read, what is refused before anything starts, and what a Poisson draws."""

from itertools import pairwise, takewhile
from math import exp
from pathlib import Path
from statistics import fmean, pstdev

import pytest
import yaml

import dd_lightning.conf as conf
from dd_lightning.chaos import plan as module
from dd_lightning.chaos.plan import FaultPlan, RunShape

pytestmark = pytest.mark.unit

SMOKE = RunShape(
    learners=("0", "1"), max_steps=700, step_floor_s=0.05, first_checkpoint_s=5.0, seed=1
)
OWN = {"kind": "kill", "target": 1, "at_step": 150}
KILL = {"name": "own", **OWN}


def load(run=SMOKE, **values):
    return FaultPlan.load(values, run)


def test_one_fault_a_list_and_defaults():
    (fault,) = load(**KILL).faults
    assert (fault.role, fault.at_step, fault.at_learner) == ("learner 1", 150, "1")
    assert fault.planned == {"step": 150} and fault.options == {}
    entries = [
        {"kind": "pause", "target": 0, "at_s": 9.5},
        {"kind": "kill_syncer", "at_step": 200},
        {"kind": "partition", "target": 1, "at_learner": 0, "at_step": 3, "seconds": 7},
    ]
    pause, syncer, cut = load(name="plan", faults=entries).faults
    assert pause.planned == {"t_s": 9.5} and pause.options == {"seconds": 5}
    assert syncer.role == "syncer" and syncer.planned == {"step": 200, "learner": "0"}
    assert cut.planned == {"step": 3, "learner": "0"} and cut.lasts_s == 7


def test_nan_from_a_command_line_is_a_number_and_means_the_word():
    (fault,) = load(name="x", kind="poison", target=1, at_step=9, values=float("nan")).faults
    assert fault.options == {"values": "nan"}


def test_what_a_plan_needs_of_the_run():
    plan = load(name="plan", faults=[{"kind": "kill_syncer", "at_s": 9}, OWN])
    assert plan.kills == {"syncer", "learner 1"} and not plan.needs_proxy and not plan.needs_root
    drawn = load(name="x", poisson={"faults": [{"kind": "kill"}, {"kind": "flap", "target": 1}]})
    assert drawn.kills == {"learner 0", "learner 1"} and drawn.needs_proxy
    assert load(name="none", faults=[]).kinds == frozenset()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "kil"}, r"chaos\.kind is 'kil'; allowed: kill \| pause"),
        ({"target": 2}, r"chaos\.target is 2; allowed: a learner of the run: 0, 1"),
        ({"target": None}, r"chaos\.target is None"),
        ({"target": True}, r"chaos\.target is True"),
        ({"at_step": 700}, r"chaos\.at_step is 700; allowed: below max_steps = 700"),
        ({"at_step": 0}, r"chaos\.at_step is 0"),
        ({"at_step": None}, r"at_step and at_s is .*; allowed: one of the two"),
        ({"at_s": 3}, r"at_step and at_s is .*; allowed: one of the two"),
        ({"at_step": None, "at_s": 0}, r"chaos\.at_s is 0; allowed: a finite number > 0"),
        ({"min_left_s": 28, "at_step": 141}, r"chaos\.at_step is 141; allowed: at most 140"),
        ({"min_left_s": -1}, r"chaos\.min_left_s is -1"),
        ({"not_before": "end"}, r"chaos\.not_before is 'end'"),
        ({"secondz": 3}, r"chaos\.secondz is 3, but it is not a setting here"),
        ({"seconds": 3}, r"chaos\.seconds is 3, but it is not a setting here"),
        ({"kind": "pause", "seconds": 0}, r"chaos\.seconds is 0; allowed: .* > 0"),
        ({"kind": "pause", "secondz": 3}, r"Did you mean chaos\.seconds\?"),
        ({"kind": "slow", "factor": 1}, r"chaos\.factor is 1"),
        ({"kind": "flap", "every_s": 0.5}, r"chaos\.every_s is 0\.5; allowed: above seconds"),
        ({"kind": "bandwidth", "share": 1}, r"chaos\.share is 1"),
        ({"kind": "corrupt", "flips": 0}, r"chaos\.flips is 0"),
        ({"kind": "poison", "values": "big"}, r"chaos\.values is 'big'"),
        ({"kind": "poison", "values": "huge"}, r"at least 3 of both"),
        ({"kind": "kill_syncer"}, r"chaos\.target is 1; allowed: null or syncer"),
        ({"poisson": {"faults": [KILL]}}, r"chaos=own with .*allowed: one of them"),
        ({"name": ""}, r"chaos\.name is ''"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(change, said):
    with pytest.raises(ValueError, match=said):
        load(**{**KILL, **change})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "none", "faults": [KILL]}, "Own lists: chaos=plan"),
        ({"name": "plan", "faults": "kill"}, r"chaos\.faults is 'kill'; allowed: a list"),
        ({"name": "plan", "faults": [3]}, r"chaos\.faults\[0\] is 3; allowed: a mapping"),
        ({"name": "plan", "fault": []}, r"chaos\.fault is .*Did you mean chaos\.faults"),
        ({"name": "x", "poisson": {"faults": []}}, r"chaos\.poisson\.faults is \[\]"),
        ({"name": "x", "poisson": {"mean": 3}}, r"chaos\.poisson\.mean is 3"),
        ({"name": "x", "poisson": {"faults": [{"kind": "kill", "at_step": 3}]}}, "at_step is 3"),
    ],
)
def test_wrong_lists_and_processes_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        load(**values)


def test_a_run_too_short_for_any_fault_is_refused():
    run = RunShape(learners=("0",), max_steps=500, step_floor_s=0.05, first_checkpoint_s=5.0)
    with pytest.raises(ValueError, match=r"trainer\.max_steps is 500; allowed: more steps"):
        load(run, name="x", min_left_s=25, poisson={"faults": [{"kind": "kill"}]})


def test_a_full_disk_needs_root(monkeypatch):
    disk = {"name": "full_disk", "kind": "full_disk", "at_step": 150}
    monkeypatch.setattr(module, "_may_mount", lambda: False)
    with pytest.raises(ValueError, match="as root with the right to mount"):
        load(**disk)
    monkeypatch.setattr(module, "_may_mount", lambda: True)
    plan = load(**disk)
    assert plan.needs_root and plan.disk_mib == 64


def test_gaps_are_exponential_and_not_periodic():
    """A loop that draws a time but sleeps the mean has gaps that are all alike."""
    poisson = load(name="x", poisson={"faults": [{"kind": "kill"}]}).poisson
    times = [at_s for at_s, _ in takewhile(lambda drawn: drawn[0] < 20_000, poisson.draw(5.0))]
    gaps = [after - before for before, after in pairwise([0.0, *times])]
    assert fmean(gaps) == pytest.approx(5.0, rel=0.06)  # 4000 gaps: 4 standard errors
    assert pstdev(gaps) == pytest.approx(5.0, rel=0.1)  # as large as the mean
    distance = max(  # Kolmogorov-Smirnov: above 1.63/sqrt(n) in one of a hundred
        abs((rank + 0.5) / len(gaps) - (1 - exp(-gap / 5.0)))
        for rank, gap in enumerate(sorted(gaps))
    )
    assert distance < 1.63 / len(gaps) ** 0.5


def test_a_process_repeats_with_its_seed_and_draws_kinds_by_weight():
    entries = [{"kind": "kill", "weight": 3}, {"kind": "kill_syncer"}]

    def drawn(seed, count=400):
        poisson = load(name="x", seed=seed, poisson={"faults": entries}).poisson
        return [fault for _, fault in zip(range(count), poisson.draw(2.0), strict=False)]

    first = drawn(7)
    assert first == drawn(7) != drawn(8)
    faults = [fault for _, fault in first]
    assert [fault.number for fault in faults] == list(range(400))
    roles = [fault.role for fault in faults]
    assert 60 < roles.count("syncer") < 140
    assert abs(roles.count("learner 0") - roles.count("learner 1")) < 80
    assert faults[0].planned == {"poisson": 2.0}


def test_the_default_mean_gives_three_faults_in_the_time_they_may_fire():
    entries = {"faults": [{"kind": "kill"}]}
    plan = load(name="x", min_left_s=15, poisson=entries)
    assert plan.window_s == 15 and plan.poisson.scaled(15) == 5
    assert load(name="x", poisson={**entries, "mean_s": 2}).poisson.scaled(15) == 2
    (line,) = plan.describe()
    assert "mean 5.0 s, seconds from the first checkpoint on: kill of learner" in line


@pytest.mark.parametrize("file", sorted((Path(conf.__file__).parent / "chaos").glob("*.yaml")))
def test_every_shipped_file_is_a_plan_that_fits_the_smoke_run(file, monkeypatch):
    monkeypatch.setattr(module, "_may_mount", lambda: True)
    values = yaml.safe_load(file.read_text())
    values = values.get("chaos", values) | {"min_left_s": 25}
    run = SMOKE
    if values["name"] == "poison_huge":
        run = RunShape(learners=tuple("0123"), max_steps=700, step_floor_s=0.05, guarded=3)
    plan = FaultPlan.load(values, run)
    assert plan.name == file.stem
    assert bool(plan.kinds) == (file.stem not in ("none", "plan"))
    assert all(plan.describe()) and len(plan.describe()) == bool(plan.kinds)
