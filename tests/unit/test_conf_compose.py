"""Every shipped configuration composes, resolves and passes the checks; presets equal the code."""

from pathlib import Path

import msgspec
import pytest
import yaml
from hydra import compose, initialize_config_module
from lightning.pytorch.strategies import FSDPStrategy
from omegaconf import OmegaConf

import dd_lightning.conf as conf
from dd_lightning.algorithm import PRESETS
from dd_lightning.launch.learner_kind import inner_of
from dd_lightning.launch.settings import check
from dd_lightning.launch.task import build_module, check_task
from dd_lightning.protocol.config import AlgorithmConfig, Timeouts
from dd_lightning.tasks.text.gpt import Block

pytestmark = pytest.mark.unit

CONF = Path(conf.__file__).parent
SIMULATED = ("data_parallel", "data_parallel_elastic")  # baselines without a preset in the code
GROUPS = sorted(path.name for path in CONF.iterdir() if list(path.glob("*.yaml")))


def resolved(*overrides):
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        return OmegaConf.to_container(compose("config", list(overrides)), resolve=True)


def choices(group):
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def test_the_groups_are_those_promised():
    promised = {"task", "algorithm", "network", "chaos", "launcher", "logger", "learner"}
    assert promised | {"experiment", "arm"} <= set(GROUPS)


@pytest.mark.parametrize("choice", [f"{g}={c}" for g in GROUPS for c in choices(g)])
def test_every_choice_composes_and_passes_the_checks(choice):
    simulated = ["mode=simulate"] if choice.startswith("algorithm=data_parallel") else []
    settings = check(resolved(choice, *simulated))
    check_task(settings.values, settings.syncer.num_data_slots)


@pytest.mark.parametrize("experiment", ["bench_failures", "demo", "smoke"])  # no studies
@pytest.mark.parametrize("network", choices("network"))
@pytest.mark.parametrize("learners", [3, 8])
def test_experiments_combine_with_networks_and_learners(experiment, network, learners):
    overrides = [f"experiment={experiment}", f"network={network}", f"learners={learners}"]
    if network == "none" and experiment == "demo":
        overrides.append("network.bandwidth_scale=1")  # there is no bandwidth to scale
    assert check(resolved(*overrides)).values["learners"] == learners


@pytest.mark.parametrize("name", sorted({*choices("algorithm")} - {*SIMULATED}))
def test_algorithm_files_are_the_presets_key_by_key(name):
    written = yaml.safe_load((CONF / "algorithm" / f"{name}.yaml").read_text())
    assert written.pop("preset") == name
    # settings that no preset names stand at their default
    for extra in written.keys() - PRESETS[name].keys():
        assert written.pop(extra) == getattr(AlgorithmConfig(), extra)
    assert written == PRESETS[name]


def test_every_preset_and_every_setting_of_the_algorithm_has_its_place():
    assert choices("algorithm") == sorted([*PRESETS, *SIMULATED])
    written = yaml.safe_load((CONF / "algorithm" / "paper.yaml").read_text())
    assert written.keys() == set(AlgorithmConfig.__struct_fields__)


def test_timeouts_file_is_the_code_s_defaults():
    written = yaml.safe_load((CONF / "timeouts" / "default.yaml").read_text())
    assert written == msgspec.to_builtins(Timeouts())


def test_files_are_short_and_experiments_say_how_to_run_them():
    for path in CONF.rglob("*.yaml"):
        assert len(path.read_text().splitlines()) <= 40, path
    for name in choices("experiment"):
        text = (CONF / "experiment" / f"{name}.yaml").read_text()
        assert f"# dd-lightning launch experiment={name}" in text


def test_loggers_are_selected_as_a_list():
    assert set(resolved("logger=[csv,aim]")["logger"]) == {"csv", "aim"}


def test_fsdp_learners_shard_the_units_of_the_task():
    values = check(resolved("learner=fsdp", "task=text")).values
    inner = inner_of(values, build_module(values))
    assert isinstance(inner, FSDPStrategy) and values["learner"]["devices"] == 2
    assert inner.kwargs["auto_wrap_policy"]._module_classes == {Block}


def test_learners_may_differ():
    found = resolved("learner.overrides={1: {trainer: {max_steps: 7}}}")
    assert check(found).values["learner"]["overrides"] == {1: {"trainer": {"max_steps": 7}}}
