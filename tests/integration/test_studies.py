"""Every study of conf/experiment: one command, three seeds, each arm of it plays to its end."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import dd_lightning.conf as conf
from dd_lightning.cli import main
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import check_task
from dd_lightning.simulate.run import SimulatedRun
from dd_lightning.tasks.text.corpus import Document
from dd_lightning.tasks.text.sotu import ERAS
from tests.integration.test_simulate import Silent
from tests.named_pictures import write_named

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

FILES = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (Path(conf.__file__).parent / "experiment").glob("*.yaml")
}
STUDIES = sorted(name for name, values in FILES.items() if "study" in values)
TASKS = {  # of the others: text
    "compare_moe": "text_moe",
    "compare_vision": "vision",
    "compare_vision_language": "vision_language",
    "batch_norm": "vision",
}
GPT = ["task.module.gpt.width=16", "task.module.gpt.heads=2", "task.data.max_bytes=400000"]
PAIRS = ["task.data.source=webdataset", "task.data.num_shards=8", "task.data.batch_size=8"]
SMALL = {"text": GPT, "text_moe": GPT, "vision_language": PAIRS}
TINY = [
    "task.data.validation_samples=16",
    "evaluate.every_s=1000",
    "checkpoint.every_s=1000",
    "simulate.step_s=0.5",  # so that a few steps outlast the handshakes
]
GROUPED = ["task.data.validation_samples=300"]  # some of each group
MADE_UP = ["task.data.source=sotu", "task.data.split=era"]  # docs has its groups in megabytes only
EXTRA = {"eras": GROUPED, "bias": [*GROUPED, *MADE_UP]}
SECONDS = 110.0  # for four tiny jobs at once, on a busy machine


def task_of(name: str) -> str:
    return TASKS.get(name, "text")


@cache
def full(name: str) -> DictConfig:
    """A study's whole configuration, with Hydra's own."""
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        return compose("config", [f"experiment={name}"], return_hydra_config=True)


def swept(name: str) -> dict[str, list[str]]:
    """Of a study: its swept settings and the values of each."""
    return {key: str(value).split(",") for key, value in full(name).hydra.sweeper.params.items()}


def jobs(name: str) -> list[list[str]]:
    """The overrides of each of its jobs of the first seed."""
    found = {key: values for key, values in swept(name).items() if key != "seed"}
    return [
        [f"{key}={value}" for key, value in zip(found, values, strict=True)]
        for values in itertools.product(*found.values())
    ]


def settings_of(name: str, *overrides: str):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", [f"experiment={name}", *overrides])
    return check(OmegaConf.to_container(config, resolve=True))


def addresses(count: int = 160) -> list[Document]:
    """In the place of those that npm gets."""
    draw, eras = random.Random(0), list(ERAS.values())
    words = ["peace", "union", "congress", "treaty", "people", "of the", "economy"]
    return [
        Document(str(index), " ".join(draw.choices(words, k=150)).encode(), eras[index % 4])
        for index in range(count)
    ]


@pytest.fixture
def play(tmp_path, tmp_path_factory, monkeypatch):
    """Plays a job of a study, tiny; gives its summary."""
    prepare = sys.modules["dd_lightning.tasks.text.prepare"]  # a function has its name
    monkeypatch.setattr(prepare, "sotu_documents", addresses)
    data = tmp_path_factory.getbasetemp() / "studies-data"

    def run(name: str, *overrides: str) -> dict:
        small = SMALL.get(task_of(name), [])
        if task_of(name) == "vision_language":
            small = [*small, f"task.data.path='{write_named(data / 'named')}'"]
        overrides = (*EXTRA.get(name, ()), *overrides)
        settings = settings_of(name, *small, *TINY, f"task.data.cache_dir={data}", *overrides)
        module = check_task(settings.values, settings.syncer.num_data_slots)
        outcome = SimulatedRun(settings, tmp_path, module, Silent(), draw=False).execute()
        assert outcome.status == "finished", outcome.problems
        return json.loads((tmp_path / "summary.json").read_text())

    return run


def test_the_studies_are_those_promised():
    first = {"timelines", "heterogeneous", "merge_rule", "learners"}
    first |= {"fragments", "scavenging", "failures", "apply"}
    assert set(STUDIES) == first | {"compare_text", "eras", "bias", *TASKS}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_one_command_of_three_seeds_in_virtual_time(name):
    assert len(set(swept(name)["seed"])) >= 3
    for overrides in jobs(name):
        values = settings_of(name, *overrides).values
        assert values["mode"] == "simulate" and values["task"]["name"] == task_of(name)
    assert full(name).hydra.mode.name == "MULTIRUN"


@pytest.mark.parametrize("name", STUDIES)
def test_a_tiny_job_of_a_study_plays_to_its_end(name, play):
    last = [one for one in jobs(name)[-1] if not one.startswith("learners=")]
    assert play(name, *last, "trainer.max_steps=12")["rounds"] > 0


@pytest.mark.parametrize(
    ("arm", "least", "most"),
    [("wait_for_all", 0.80, 0.88), ("first_only", 0.99, 1.0), ("first_and_grace", 0.99, 1.0)],
)
def test_goodput_of_heterogeneous_learners_is_the_paper_s(arm, least, most, play):
    """84, 100 and 100 % in the paper; jitter and speeds are the study's own."""
    summary = play("heterogeneous", f"study.arm={arm}", "trainer.max_steps=50")
    assert least <= summary["goodput"] <= most
    assert summary["contributors"]["mean"] > 7 or arm == "first_only"


def test_two_jobs_at_once_then_the_table_and_a_wrong_job_in_the_exit_code(tmp_path, capsys):
    sweep = tmp_path / "sweep"
    command = [sys.executable, "-m", "dd_lightning.cli", "launch", "experiment=merge_rule"]
    command += [*GPT, *TINY]
    command += [f"task.data.cache_dir={tmp_path / 'data'}", f"hydra.sweep.dir={sweep}"]
    command += ["trainer.max_steps=4", "learners=2", "seed=1", "algorithm.outer.lr=0.7,-1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 2, done.stderr  # of the two wrong jobs; the others played
    assert "algorithm.outer.lr is -1" in done.stderr
    assert main(["report", str(sweep), "--json"]) == 0
    study = json.loads(capsys.readouterr().out)["study"]
    assert study["swept"] == ["algorithm.merge"]
    assert [row["settings"]["algorithm.merge"] for row in study["rows"]] == ["average", "rda"]
    assert "| rda | 1 |" in (sweep / "study.md").read_text()
