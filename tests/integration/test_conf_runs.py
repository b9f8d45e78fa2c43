"""Every choice of every group of `conf` plays a few steps, simulated: few runs that cover them all.

Choices of `experiment`, `study` and `arm` are in `test_conf_experiments.py`; groups of two ranks in
processes are slow, and in `tests/conformance`: here each kind of learner is a group of one rank.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import dd_lightning.conf as conf
from dd_lightning.launch.learner import train
from dd_lightning.launch.settings import check
from dd_lightning.protocol.tape import read_tape
from tests.integration import test_report_aim
from tests.named_pictures import write_named
from tests.simulated_runs import QUICK, TINY, simulate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

CONF = Path(conf.__file__).parent
STEPS = 16  # of half a virtual second, so that a few outlast handshakes and faults
AT_STEP = ("chaos.at_step=4",)
SHORT = (*AT_STEP, "chaos.seconds=1")
DRAWN = ("chaos.min_left_s=4",)
PACE = (
    f"trainer.max_steps={STEPS}", "simulate.step_s=0.5", "simulate.restart_s=0.5",
    "checkpoint.every_s=1", "chaos.not_before=start",
)  # fmt: skip
FOUR = ("learners=4",)
OFTEN = (*DRAWN, *FOUR, "chaos.poisson.per_run=4")  # of fourteen one would fall near the end
# Algorithm, task, network, chaos; overrides that make the fault of a choice fit.
RUNS = [
    ("paper", "text", "none", "none", ()),
    ("short_run", "text_moe", "lan", "poisson", DRAWN),
    ("streaming", "text", "us", "pause_learner", SHORT),
    ("diloco", "vision", "home", "slow_learner", SHORT),
    ("data_parallel", "vision_language", "us_eu", "plan", ()),
    ("data_parallel_elastic", "text", "us_asia", "kill_learner", AT_STEP),
    ("short_run", "text", "eight_regions", "partition", SHORT),
    ("short_run", "text", "three_continents", "kill_syncer", AT_STEP),
    ("short_run", "vision_language", "cross_cloud", "mixed", (*DRAWN, *FOUR)),
    ("short_run", "vision", "degraded", "bandwidth_collapse", SHORT),
    ("short_run", "text", "partitioned", "flap", (*AT_STEP, "chaos.seconds=0.2")),
    ("short_run", "text", "none", "corrupt", SHORT),
    ("short_run", "text", "none", "full_disk", SHORT),
    ("short_run", "text", "none", "poison_nan", AT_STEP),
    ("short_run", "text", "none", "poison_huge", (*AT_STEP, *FOUR)),
    ("paper", "text", "none", "poisson_often", OFTEN),
]
COVERED = ("algorithm", "task", "network", "chaos")
OTHER_LOGGERS = "[aim,tensorboard,wandb]"  # a whole run of test_report_aim.py
ELSEWHERE = ("experiment", "study", "arm")  # test_conf_experiments.py
# one choice each, in all runs
ONLY = {"launcher": "local", "simulate": "default", "timeouts": "default", "trainer": "default"}


def choices(group: str) -> set[str]:
    return {path.stem for path in (CONF / group).glob("*.yaml")}


def test_the_runs_cover_every_choice_of_every_group():
    groups = {path.name for path in CONF.iterdir() if list(path.glob("*.yaml"))}
    assert groups == {*COVERED, "logger", "learner", *ELSEWHERE, *ONLY}
    for index, group in enumerate(COVERED):
        assert {run[index] for run in RUNS} == choices(group), group
    assert set(LEARNERS) == choices("learner")
    assert {"csv", *OTHER_LOGGERS.strip("[]").split(",")} == choices("logger")
    assert f'"logger={OTHER_LOGGERS}"' in Path(test_report_aim.__file__).read_text()
    assert all(choices(group) == {name} for group, name in ONLY.items())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Prepared once for all runs, and the user's own tars of named pictures."""
    folder = tmp_path_factory.mktemp("data")
    return folder, write_named(folder / "named")


def small(algorithm: str, task: str, named: str) -> list[str]:
    tiny = [*_small(task, named), *PACE]
    if algorithm.startswith("data_parallel"):
        # the preset's own again: other ones have no effect, and say so
        return [one for one in tiny if not one.startswith("algorithm.")] + ["algorithm.fragments=1"]
    return tiny


def _small(task: str, named: str) -> tuple[str, ...]:
    if task.startswith("text"):
        return TINY
    own = (*QUICK, "task.data.num_shards=8", "task.data.batch_size=4", "task.module.vit.width=16",
           "task.data.validation_samples=8")  # fmt: skip
    if task == "vision":
        return own
    return (*own, "task.data.source=webdataset", f"task.data.path='{named}'", "task.data.size=8",
            "task.module.vit.patch=4", "task.module.gpt.width=16")  # fmt: skip


@pytest.mark.parametrize(
    "run", RUNS, ids=lambda run: "-".join(str(part).strip("[]") for part in run[:4])
)
def test_choices_run(run, data, tmp_path):
    algorithm, task, network, chaos, overrides = run
    chosen = [f"algorithm={algorithm}", f"task={task}", f"network={network}", f"chaos={chaos}"]
    folder, named = data
    simulate(
        folder, tmp_path / "run", *chosen,
        *overrides, base=small(algorithm, task, named),
    )  # fmt: skip
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert max(one["steps"] for one in summary["per_learner"].values()) == STEPS
    faults = [one for one in read_tape(tmp_path / "run" / "tape.jsonl") if one["event"] == "fault"]
    assert bool(faults) is (chaos not in ("none", "plan"))


LEARNERS = ("single", "ddp", "fsdp", "fsdp2")


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # one rank
@pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``")
@pytest.mark.parametrize("kind", LEARNERS)
def test_each_kind_of_learner_runs(kind, data, tmp_path, syncer, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, "")  # so that what Lightning sets is taken back
        monkeypatch.delenv(name)
    given = [one for one in TINY if one not in ("mode=simulate", "launcher.step_floor_s=0")]
    given += [f"learner={kind}", "learner.devices=1", "learners=1", "trainer.max_steps=2"]
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [*given, f"task.data.cache_dir={data[0]}"])
    settings = check(OmegaConf.to_container(config, resolve=True))
    running = syncer(settings.syncer)
    try:
        train(settings.values, "0", tmp_path / "learner", "tcp://127.0.0.1:1")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    (join,) = running.events("join")
    assert join["ranks"] == 1
    assert [one["learner"] for one in running.events("contribution")]
