"""Baselines under mode=simulate: data-parallel (elastic or not), DiLoCo and Streaming DiLoCo."""

import json
import warnings
from pathlib import Path

import jsonschema
import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.cli import main
from dd_lightning.launch.data_parallel import is_chosen
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import check_task
from dd_lightning.protocol.tape import read_tape
from dd_lightning.report.summary import summarize
from dd_lightning.simulate.data_parallel import DataParallelRun
from dd_lightning.simulate.run import SimulatedRun

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

SCHEMA = json.loads((Path(__file__).parents[1] / "schema" / "summary.schema.json").read_text())
STEPS, LEARNERS, TOKENS = 24, 2, 128  # tokens a batch: 2 sequences of 64
TINY = [
    "experiment=smoke",
    "mode=simulate",
    "launcher.step_floor_s=0",
    f"trainer.max_steps={STEPS}",
    "checkpoint.every_s=0.5",
    "evaluate.every_s=0.7",
    "task.data.batch_size=2",
    "task.data.validation_samples=32",
    "task.module.gpt.width=32",
    "task.module.gpt.dropout=0.1",
    "network=us_eu",
    "network.bandwidth_scale=0.1",
    "chaos.min_left_s=0",
]
JOB = ["algorithm=data_parallel", "algorithm.fragments=1"]
KILL = ["chaos=kill_learner", "chaos.at_step=17"]


class Silent:
    """A view that keeps what it is told."""

    def __init__(self):
        self.said = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def say(self, text):
        self.said.append(text)

    def refresh(self):
        return None


def settings_of(*overrides):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*TINY, *overrides])
    return check(OmegaConf.to_container(config, resolve=True))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory):
    """Plays TINY with overrides, each combination once; gives the run folder and its summary."""
    data = tmp_path_factory.mktemp("data")
    played = {}

    def play(*overrides, again=0, draw=False):
        key = (*overrides, again)
        if key not in played:
            settings = settings_of(f"task.data.cache_dir={data}", *overrides)
            folder = tmp_path_factory.mktemp("run")
            task = check_task(settings.values, settings.syncer.num_data_slots)
            kind = DataParallelRun if is_chosen(settings.values) else SimulatedRun
            outcome = kind(settings, folder, task, Silent(), draw=draw).execute()
            assert outcome.status == "finished" and not outcome.problems, outcome.problems
            summary = json.loads((folder / "summary.json").read_text())
            jsonschema.validate(summary, SCHEMA)
            played[key] = folder, summary
        return played[key]

    return play


def rows(folder, event):
    return [row for row in read_tape(folder / "tape.jsonl") if row["event"] == event]


def test_the_same_seed_gives_the_same_run_and_time_does_not_change_the_model(simulate):
    settings = [*JOB, "simulate.distribution=normal", "simulate.jitter=0.1"]
    (one, first), (two, second) = simulate(*settings), simulate(*settings, again=1)
    assert (one / "tape.jsonl").read_bytes() == (two / "tape.jsonl").read_bytes()
    assert first == second
    _, plain = simulate(*JOB)
    assert plain["parameters_sha256"] == first["parameters_sha256"]  # time does not change it
    assert plain["seconds"] != first["seconds"]


def test_the_summary_says_what_the_job_did(simulate):
    folder, summary = simulate(*JOB)
    (layout,) = rows(folder, "layout")
    assert summary["rounds"] == STEPS and summary["effective_h"] == 1.0
    assert summary["contributors"] == {"min": 2, "mean": 2.0, "max": 2}
    assert summary["loss"]["validation"] < 0.95 * summary["loss"]["initial"]
    # a ring of two: each sends the whole gradient once a step
    sent = STEPS * layout["elements"][0] * 4
    for member in summary["per_learner"].values():
        assert member["wire_bytes"] == {"up": sent, "down": sent}
        assert member["tokens"] == member["tokens_merged"] == STEPS * TOKENS
        assert member["steps"] == STEPS and member["joins"] == 1
        assert member["seconds_stepping"] == pytest.approx(STEPS * 0.05)
    # the all-reduce across the sea is no stepping
    assert summary["goodput"] == pytest.approx(STEPS * 0.05 / summary["seconds"], rel=1e-3)
    assert summary["goodput"] < 0.6
    curve = [row for row in rows(folder, "evaluation") if row["tokens_merged"] is not None]
    assert len(curve) >= 4
    assert [row["tokens_merged"] for row in curve] == sorted(row["tokens_merged"] for row in curve)


def test_equal_steps_are_equal_tokens_under_every_algorithm(simulate):
    _, job = simulate(*JOB)
    _, decoupled = simulate("algorithm.fragments=3", "algorithm.sync_every=6")
    for learner in ("0", "1"):
        ours, theirs = job["per_learner"][learner], decoupled["per_learner"][learner]
        assert (ours["steps"], ours["tokens"]) == (theirs["steps"], theirs["tokens"])
    assert job["loss"]["initial"] == decoupled["loss"]["initial"]  # the same values to begin with
    assert job["bytes"]["up"] > 3 * decoupled["bytes"]["up"]


def test_a_job_that_goes_back_to_its_checkpoint_comes_to_the_same_model(simulate):
    _, undisturbed = simulate(*JOB)
    folder, killed = simulate(*JOB, *KILL, "simulate.restart_s=2")
    # position in the data, dropout masks, optimizer and schedule are the checkpoint's
    assert killed["parameters_sha256"] == undisturbed["parameters_sha256"]
    (rewind,), checkpoints = rows(folder, "rewind"), rows(folder, "checkpoint")
    assert rewind["steps_lost"] == 17 - rewind["step"] >= 2
    assert rewind["step"] in [row["step"] for row in checkpoints]
    for member in killed["per_learner"].values():
        assert member["tokens_lost"] == rewind["steps_lost"] * TOKENS
        assert member["tokens"] == member["tokens_merged"] + member["tokens_lost"]
        assert member["joins"] == 2 and member["steps"] == STEPS
    assert killed["rounds"] == STEPS and killed["effective_h"] == 1.0
    again = rewind["steps_lost"] * (undisturbed["seconds"] / STEPS)
    assert killed["seconds"] - undisturbed["seconds"] == pytest.approx(2 + again, rel=0.3)
    assert killed["uptime"] < 0.9


def test_any_prefix_of_its_tape_has_a_summary_whose_tokens_add_up(simulate):
    folder, _ = simulate(*JOB, *KILL, "simulate.restart_s=2")
    tape = list(read_tape(folder / "tape.jsonl"))
    for length in range(2, len(tape)):
        summary = summarize(tape[:length])
        jsonschema.validate(summary, SCHEMA)
        for member in summary["per_learner"].values():
            for row in member["ledger"]:
                assert row["processed"] == row["merged"] + row["lost"] + row["pending"]


def test_an_elastic_job_goes_on_without_the_member_and_loses_no_token(simulate):
    settings = ["algorithm.elastic=true", "algorithm.downscale_s=0.3", "algorithm.upscale_s=0.2"]
    folder, summary = simulate(*JOB, *KILL, *settings, "simulate.restart_s=0.4")
    reduced = rows(folder, "all_reduce")
    alone = [row for row in reduced if row["members"] == ["0"]]
    assert [row["step"] for row in reduced] == list(range(1, STEPS + 1))
    assert alone and reduced[-1]["members"] == ["0", "1"]
    survivor, back = summary["per_learner"]["0"], summary["per_learner"]["1"]
    assert (survivor["joins"], back["joins"]) == (1, 2)
    assert summary["tokens_merged_share"] == 1.0
    assert survivor["tokens"] - back["tokens"] == len(alone) * TOKENS
    joined = rows(folder, "join")[-1]
    assert (joined["learner"], joined["state_from"]) == ("1", "peer")
    assert joined["data_position"] == 17


def test_the_token_budget_ends_a_job(simulate):
    budget = 5 * LEARNERS * TOKENS
    _, summary = simulate(*JOB, f"budget.tokens={budget - 1}")
    assert sum(one["tokens"] for one in summary["per_learner"].values()) == budget
    assert summary["rounds"] == 5


def test_its_report_leaves_out_what_it_has_not_and_its_tape_is_not_replayed(simulate, capsys):
    folder, _ = simulate(*JOB, *KILL, "simulate.restart_s=2")
    assert main(["report", str(folder)]) == 0
    page = (folder / "report.html").read_text()
    assert "Left out, since a data-parallel run has no contributions: Contributors of" in page
    assert "where data-parallel training would have sent" not in page
    assert not (folder / "figures" / "contributors.png").exists()
    assert (folder / "figures" / "timeline.png").exists()
    assert "dead (killed)" in page and "joined (state: checkpoint)" in page
    capsys.readouterr()
    assert main(["replay", str(folder)]) == 2
    assert "algorithm=data_parallel" in capsys.readouterr().err


@pytest.mark.parametrize("algorithm", ["diloco", "streaming"])
def test_synchronous_presets_wait_for_everybody(simulate, algorithm):
    fragments = 1 if algorithm == "diloco" else 3
    folder, summary = simulate(
        f"algorithm={algorithm}",
        "algorithm.sync_every=6",
        f"algorithm.fragments={fragments}",
        "simulate.step_s=1.0",
        "simulate.speeds=[1,0.5]",
        "evaluate.every_s=100",
    )
    finishing = min(row["t_s"] for row in rows(folder, "state") if row["state"] == "finishing")
    merges = [row for row in rows(folder, "merge") if row["t_s"] < finishing]
    assert len(merges) >= 3
    assert {tuple(row["contributors"]) for row in merges} == {("0", "1")}
    assert summary["loss"]["validation"] < summary["loss"]["initial"]
    # the fast one stands still for about half of the time
    assert 0.65 < summary["goodput"] < 0.9


# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=processes"], "algorithm is 'data_parallel'; allowed: under mode=simulate"),
        (["algorithm.downscale_s=-1"], "algorithm.downscale_s is -1"),
        (["algorithm.elastic=maybe"], "algorithm.elastic is 'maybe'; allowed: false | true"),
        (["learner.overrides={1: {trainer: {max_steps: 7}}}"], "learner.overrides is"),
        (["launcher.resume=last"], "launcher.resume is 'last'; allowed: null under"),
        (["chaos=poison_nan", "chaos.at_step=15"], "chaos has faults of kind poison"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(overrides, said):
    with pytest.raises(ValueError) as refused:
        settings_of(*JOB, *overrides)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.sync_every=6"], "algorithm.sync_every: no effect under"),
        (["simulate.joins={1: 2}"], "simulate.joins has no effect under"),
        (["chaos=kill_syncer", "chaos.at_step=15"], "chaos: kill_syncer has no effect under"),
    ],
)
def test_what_has_no_effect_is_told(overrides, said):
    with pytest.warns(UserWarning, match=said):
        settings_of(*JOB, *overrides)


def test_sweeps_may_set_what_others_need():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = settings_of("algorithm=data_parallel", "algorithm.sync_every=12").values
    assert set(values["algorithm"]) == {"preset", "elastic", "downscale_s", "upscale_s",
                                        "max_learners"}  # fmt: skip
