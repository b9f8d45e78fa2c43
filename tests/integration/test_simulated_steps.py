"""A simulated run that takes each learner's steps from the log of a real one."""

from __future__ import annotations

import json

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.settings import check
from dd_lightning.launch.task import check_task
from dd_lightning.simulate.run import SimulatedRun
from tests.integration.test_estimate_against_runs import TINY, Silent

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

STEPS = 24


def test_each_learner_takes_the_time_that_it_measured(tmp_path):
    logged = {"0": [0.05] * STEPS, "1": [0.1, 0.2] * (STEPS // 2)}
    for learner, seconds in logged.items():
        folder = tmp_path / "real" / "learners" / learner
        folder.mkdir(parents=True)
        (folder / "steps.csv").write_text("".join(f"1,{value},0.0\n" for value in seconds))
    overrides = [
        f"trainer.max_steps={STEPS}",
        f"simulate.trace={tmp_path / 'real'}",
        f"task.data.cache_dir={tmp_path / 'data'}",
        "learners=2",
    ]
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*TINY, *overrides])
    settings = check(OmegaConf.to_container(config, resolve=True))
    module = check_task(settings.values, settings.syncer.num_data_slots)
    run = tmp_path / "simulated"
    run.mkdir()
    outcome = SimulatedRun(settings, run, module, Silent(), draw=False).execute()
    assert outcome.status == "finished", outcome.problems
    learners = json.loads((run / "summary.json").read_text())["per_learner"]
    for learner, seconds in logged.items():
        assert learners[learner]["seconds_stepping"] == pytest.approx(sum(seconds))
    assert learners["1"]["step_seconds_p99"] == pytest.approx(0.2)
