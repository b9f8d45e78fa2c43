"""Every experiment takes a step: of each study the first job of its sweep (`test_studies.py` plays
the last one to its end) and every arm; those that are no study, simulated."""

from __future__ import annotations

import json

import pytest

from tests.integration.test_conf_runs import choices
from tests.integration.test_studies import STUDIES, jobs, play  # noqa: F401
from tests.simulated_runs import TINY, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

FEW = "trainer.max_steps=2"
# arms, of conf/arm on one task or a study's own, of neither the first nor the last job
ARMS = [
    *(("compare_text", f"arm={arm}") for arm in ("data_parallel", "diloco", "decoupled")),
    ("scavenging", "study.arm=plus_25"),
    *(("bias", arm) for arm in ("study.arm=uniform", "study.arm=no_grace", "arm=slow")),
]
PLAYED = {"study.arm=first_only"}  # by test_studies.py, for the paper's goodput
PLAIN = ("bench_failures", "demo", "smoke")


def test_every_experiment_study_and_arm_has_a_run():
    assert choices("experiment") == {*STUDIES, *PLAIN}
    assert choices("study") == {"compare", "small_text", "tasks"}  # in each of theirs
    ends = {one for name in STUDIES for job in (jobs(name)[0], jobs(name)[-1]) for one in job}
    swept = {one for name in STUDIES for job in jobs(name) for one in job if "arm=" in one}
    assert swept <= ends | {arm for _, arm in ARMS} | PLAYED
    assert {f"arm={name}" for name in choices("arm")} <= swept


@pytest.mark.parametrize("name", STUDIES)
def test_the_first_job_of_a_study_takes_its_steps(name, play):  # noqa: F811
    assert steps_of(play(name, *jobs(name)[0], FEW)) == 2


@pytest.mark.parametrize(("name", "arm"), ARMS)
def test_every_arm_takes_its_steps(name, arm, play):  # noqa: F811
    job = next(one for one in jobs(name) if arm in one)
    assert steps_of(play(name, *job, FEW)) == 2


@pytest.mark.parametrize("name", PLAIN)
def test_an_experiment_takes_its_steps(name, tmp_path):
    data = tmp_path.parent / "experiments-data"
    base = [one for one in TINY if not one.startswith("experiment=")]
    # five virtual seconds a step: a run over before the farthest has joined shows nothing
    simulate(data, tmp_path, f"experiment={name}", FEW, "simulate.step_s=5", base=base)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert steps_of(summary) == 2 and summary["mode"] == "simulate"


def steps_of(summary: dict) -> int:
    return max(one["steps"] for one in summary["per_learner"].values())
