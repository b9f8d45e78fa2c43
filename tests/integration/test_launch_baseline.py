"""Plain baselines of a run's task."""

import copy

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from dd_lightning.launch.baseline import train_alone
from dd_lightning.launch.task import build_data

pytestmark = pytest.mark.integration


@pytest.fixture
def values(tmp_path):
    """A small run on two documents of our own."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(40):
        line = f"line {index} of a text that repeats itself, as texts do.\n"
        (texts / f"{index}.txt").write_text(line * 20)
    overrides = ["experiment=demo", "trainer.max_steps=30", "task.module.gpt.width=16"]
    overrides += ["task.data.source=folder", f"task.data.path={texts}", "task.data.num_shards=2"]
    overrides += [f"task.data.cache_dir={tmp_path}", "task.data.validation_samples=32"]
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", overrides)
    values = OmegaConf.to_container(config, resolve=True)
    build_data(values).prepare_data()
    return values


def test_it_is_repeatable_learns_and_a_larger_batch_is_another_run(values):
    before = copy.deepcopy(values)
    first = train_alone(values)
    assert first == train_alone(values)
    assert (first.steps, first.parameters > 0) == (30, True)
    untrained = train_alone({**values, "trainer": {**values["trainer"], "max_steps": 1}})
    assert first.loss < 0.9 * untrained.loss
    assert train_alone(values, 4).loss != first.loss
    assert values == before  # the caller's are left alone
