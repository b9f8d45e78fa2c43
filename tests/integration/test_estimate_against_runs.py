"""`estimate` against simulated runs of the same configuration: bytes, rho and effective H."""

from __future__ import annotations

import json

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.settings import check
from dd_lightning.launch.task import build_module, check_task
from dd_lightning.simulate.estimate import estimate
from dd_lightning.simulate.run import SimulatedRun
from tests.simulated_runs import Silent

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

TINY = [
    "experiment=smoke",
    "mode=simulate",
    "launcher.step_floor_s=0",
    "trainer.max_steps=150",
    "algorithm.sync_every=12",
    "algorithm.fragments=4",
    "checkpoint.every_s=1000",
    "evaluate.every_s=100000",
    "task.module.gpt.width=32",
    "task.module.gpt.depth=1",
    "task.module.gpt.heads=2",
    "task.data.batch_size=1",
    "task.data.sequence_length=16",
    "task.data.max_bytes=1000000",
    "task.data.num_shards=16",
    "task.data.validation_samples=16",
    "logger=csv",
]
CONFIGURATIONS = [
    ["learners=2", "network=none"],
    ["learners=2", "network=us_eu", "algorithm.codec=bf16"],
    ["learners=4", "network=three_continents", "network.bandwidth_scale=0.01"],
    ["learners=4", "network=home", "network.bandwidth_scale=0.1"],  # its uplinks are full
    ["learners=4", "network=home", "network.bandwidth_scale=0.3", "algorithm.codec=bf16"],
    # idle between rounds: every transfer starts slowly
    ["learners=8", "network=three_continents", "simulate.step_s=0.5", "trainer.max_steps=60"],
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.mark.parametrize("overrides", CONFIGURATIONS, ids=" ".join)
def test_an_estimate_is_within_a_tenth_of_the_run(overrides, data, tmp_path):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*TINY, f"task.data.cache_dir={data}", *overrides])
    settings = check(OmegaConf.to_container(config, resolve=True))
    module = check_task(settings.values, settings.syncer.num_data_slots)
    outcome = SimulatedRun(settings, tmp_path, module, Silent(), draw=False).execute()
    assert outcome.status == "finished", outcome.problems
    run = json.loads((tmp_path / "summary.json").read_text())

    parameters = sum(p.numel() for p in build_module(settings.values).parameters())
    steps, step_s = settings.values["trainer"]["max_steps"], settings.values["simulate"]["step_s"]
    found = estimate(parameters, settings.syncer, settings.network, step_s, steps)
    assert found.effective_h == pytest.approx(run["effective_h"], rel=0.1)
    for way, estimated in (
        ("up", sum(row.bytes_up_per_step for row in found.learners)),
        ("down", sum(row.bytes_down_per_step for row in found.learners)),
    ):
        assert estimated * steps == pytest.approx(run["bytes"][way], rel=0.1), way
    assert found.bytes_per_step * steps == pytest.approx(sum(run["bytes"].values()), rel=0.1)
    for row in found.learners:
        # a millisecond: of jitter, and of links within a region
        measured = run["per_learner"][row.learner]["rho"]
        assert row.rho_s == pytest.approx(measured, rel=0.1, abs=1e-3), row.learner
