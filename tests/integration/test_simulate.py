"""`mode=simulate`: the same run again for the same seed, real parts, delays of the links."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import dd_lightning.simulate
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import check_task
from dd_lightning.protocol.tape import read_tape
from dd_lightning.simulate.run import SimulatedRun
from tests.simulated_runs import Silent

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

TINY = [
    "experiment=smoke",
    "mode=simulate",
    "launcher.step_floor_s=0",
    "trainer.max_steps=24",
    "algorithm.sync_every=6",
    "algorithm.fragments=3",
    "checkpoint.every_s=0.5",
    "evaluate.every_s=100",
    "task.data.batch_size=2",
    "logger=csv",
]


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    """Plays TINY with overrides; gives the run folder, its summary and tape."""
    data = tmp_path_factory.mktemp("data")

    def settings_of(*overrides):
        with initialize_config_module("dd_lightning.conf", version_base="1.3"):
            config = compose("config", [*TINY, f"task.data.cache_dir={data}", *overrides])
        return check(OmegaConf.to_container(config, resolve=True))

    def play(*overrides):
        settings = settings_of(*overrides)
        folder = tmp_path_factory.mktemp("run")
        module = check_task(settings.values, settings.syncer.num_data_slots)
        outcome = SimulatedRun(settings, folder, module, Silent(), draw=False).execute()
        assert outcome.status == "finished", outcome.problems
        return folder, json.loads((folder / "summary.json").read_text())

    play.settings = settings_of
    return play


def test_the_same_seed_gives_the_same_tape_and_another_seed_another_model(simulate):
    settings = ["network=us_eu", "simulate.distribution=normal", "simulate.jitter=0.1"]
    (one, first), (two, second), (_, other) = (
        simulate(*settings, f"seed={seed}") for seed in (1, 1, 2)
    )
    assert (one / "tape.jsonl").read_bytes() == (two / "tape.jsonl").read_bytes()
    assert first == second
    assert other["parameters_sha256"] != first["parameters_sha256"]
    assert first["mode"] == "simulate" and first["rounds"] >= 8


def test_times_are_virtual_and_come_from_the_model_of_steps_and_links(simulate):
    _, summary = simulate("network=us_eu", "simulate.step_s=1.0", "simulate.speeds=[1,0.5]")
    fast, slow = summary["per_learner"]["0"], summary["per_learner"]["1"]
    assert fast["step_seconds_p50"] == pytest.approx(1.0)
    assert slow["step_seconds_p50"] == pytest.approx(2.0)
    assert slow["seconds_stepping"] == pytest.approx(48.0)
    # Virginia beside the syncer, Ireland at 66 ms
    assert fast["rtt_ms_p50"] < 5 < 60 < slow["rtt_ms_p50"] < 90
    for learner in (fast, slow):
        for row in learner["ledger"]:
            assert row["processed"] == row["merged"] + row["lost"] + row["pending"]


def test_nobody_waits_and_everyone_waits(simulate):
    speeds = ["simulate.step_s=1.0", "simulate.speeds=[1,0.5]", "learners=2"]
    _, never = simulate(*speeds)
    _, waits = simulate(*speeds, "algorithm=diloco", "algorithm.sync_every=6")
    assert never["goodput"] > 0.99
    # the fast learner stands still for half of the time: (1 + 0.5) / 2, less the first round
    assert waits["goodput"] == pytest.approx(0.75, abs=0.08)
    assert waits["contributors"]["min"] == 2


def test_a_run_lists_joins_merges_and_checkpoints_like_any_other(simulate):
    folder, summary = simulate()
    kinds = [event["event"] for event in read_tape(folder / "tape.jsonl")]
    for kind in ("run", "syncer_start", "join", "merge", "apply", "checkpoint", "evaluation"):
        assert kind in kinds, kind
    assert kinds.count("run_end") == 1
    assert summary["loss"]["validation"] < summary["loss"]["initial"]


FORBIDDEN = ("merge", "grace", "rounds", "conductor", "ledger", "accounts", "closing", "averaging")


def test_the_simulator_decides_nothing_of_the_protocol():
    for path in Path(dd_lightning.simulate.__file__).parent.glob("*.py"):
        for found in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(found, ast.ImportFrom) and (found.module or "").startswith(
                "dd_lightning"
            ):
                names = [found.module.rpartition(".")[2]]
            assert not set(names) & set(FORBIDDEN), (path.name, names)
