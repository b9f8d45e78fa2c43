"""Θ from a syncer's checkpoint in the task's module: loading, evaluating, exporting."""

import json

import pytest
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from torch import nn

from dd_lightning.commands import export as command
from dd_lightning.launch.evaluator import Evaluator
from dd_lightning.launch.theta import load_theta
from dd_lightning.syncer.module import STATE_KEY
from dd_lightning.tasks.text import GPTModule

pytestmark = pytest.mark.unit

GPT = {"width": 16, "depth": 1, "heads": 2, "max_length": 16}


@pytest.fixture
def trained():
    torch.manual_seed(5)
    return GPTModule(gpt=GPT)


@pytest.fixture
def run(trained, tmp_path):
    """A run folder with one checkpoint as a syncer writes it."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("The quick brown fox jumps. " * 400)
    (tmp_path / "text" / "b.md").write_text("Lazy dogs do not jump at all. " * 400)
    for index in range(40):
        text = f"{index} foxes and {index + 1} dogs. " * 20
        (tmp_path / "text" / f"{index}.txt").write_text(text)
    overrides = [
        *(f"task.module.gpt.{key}={value}" for key, value in GPT.items() if key != "max_length"),
        "task.data.sequence_length=16",
        "task.data.num_shards=2",
        "task.data.source=folder",
        f"task.data.path={tmp_path / 'text'}",
        f"task.data.cache_dir={tmp_path / 'cache'}",
    ]
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        config = compose("config", overrides)
    OmegaConf.save(config, tmp_path / "config.yaml", resolve=True)
    (tmp_path / "syncer").mkdir()
    path = tmp_path / "syncer" / "step-1-0.ckpt"
    theta = {name: p.detach().clone() for name, p in trained.named_parameters()}
    tensors = [{"name": name, "kind": "parameter"} for name in theta]
    torch.save({"state_dict": theta, STATE_KEY: {"layout": {"tensors": tensors}}}, path)
    return path


def test_theta_is_loaded_in_place_and_ties_stay():
    module = nn.Module()
    module.a, module.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    module.b.weight = module.a.weight
    load_theta(module, {"a.weight": torch.ones(2, 2)})
    assert module.b.weight is module.a.weight
    assert torch.equal(module.b.weight, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("theta", "said"),
    [
        ({"weight": torch.zeros(3, 3)}, r"shape \(3, 3\).*has \(2, 2\)"),
        ({"other": torch.zeros(1)}, "does not have"),
    ],
)
def test_another_module_s_theta_is_refused(theta, said):
    module = nn.Linear(2, 2, bias=False)
    before = module.weight.detach().clone()
    with pytest.raises(ValueError, match=said):
        load_theta(module, theta)
    assert torch.equal(module.weight, before)


def test_the_evaluator_appends_what_the_task_measures(run, trained):
    values = OmegaConf.to_container(OmegaConf.load(run.parents[1] / "config.yaml"))
    evaluator = Evaluator(values, run.parents[1])
    evaluator._data.prepare_data()
    found = evaluator.evaluate(run, initial=True, final=False)
    (line,) = (run.parents[1] / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(line) == found
    assert found["file"] == "step-1-0.ckpt" and found["initial"] and not found["final"]
    batches = list(evaluator._data.val_dataloader())
    with torch.no_grad():
        sizes = [len(batch["labels"]) for batch in batches]
        losses = [trained.loss(batch).item() for batch in batches]
    expected = sum(n * loss for n, loss in zip(sizes, losses, strict=True)) / sum(sizes)
    assert found["loss"] == pytest.approx(expected, abs=1e-5)
    assert "bits_per_byte" in found["metrics"] and "val_loss" not in found["metrics"]


def test_export_loads_as_a_lightning_checkpoint(run, trained, tmp_path, capsys):
    out = tmp_path / "model.ckpt"
    assert command.main([str(run), "--out", str(out), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["out"] == str(out)
    loaded = GPTModule.load_from_checkpoint(out, map_location="cpu")
    assert loaded.hparams["gpt"]["width"] == GPT["width"]
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_export_to_safetensors_has_every_name_of_a_tied_tensor(run, trained, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    out = tmp_path / "model.safetensors"
    assert command.main([str(run), "--out", str(out), "--format", "safetensors"]) == 0
    loaded = load_file(out)
    assert loaded.keys() == trained.state_dict().keys()
    assert all(torch.equal(loaded[name], trained.state_dict()[name]) for name in loaded)


def test_export_refuses_what_it_cannot_use(run, tmp_path):
    with pytest.raises(ValueError, match=r"which has no config\.yaml"):
        command.main([str(run), "--run", str(tmp_path / "nowhere")])
    with pytest.raises(ValueError, match="shape"):
        command.main([str(run), "--module", "dd_lightning.tasks.text.GPTModule"])
    with pytest.raises(ValueError, match="a file that a syncer wrote"):
        command.main([str(tmp_path / "config.yaml"), "--run", str(tmp_path)])
