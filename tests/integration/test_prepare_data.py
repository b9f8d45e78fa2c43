"""`scripts/prepare_data.py` as a user runs it: JSON out, idempotent, wrong settings in one line."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate

pytestmark = [pytest.mark.integration, pytest.mark.virtual]

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
TIMEOUT_S = 100


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), f"hydra.run.dir={folder}/hydra", *overrides],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DD_DATA": str(folder / "data")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def test_prepares_a_folder_of_texts_once(tmp_path):
    (tmp_path / "texts").mkdir()
    for index in range(40):
        words = random.Random(index).choices("etaoin shrdlu", k=900)
        (tmp_path / "texts" / f"{index}.md").write_text("".join(words))
    settings = ("task.data.source=folder", f"task.data.path={tmp_path}/texts")
    first, second = run(tmp_path, *settings), run(tmp_path, *settings)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout[first.stdout.index("{") :])
    assert json.loads(second.stdout) == report
    assert Path(report["folder"]).parent == tmp_path / "data"
    assert report["shards"] == 66
    assert report["train_samples"] > 64


def test_a_wrong_setting_is_one_line_and_exit_code_2(tmp_path):
    done = run(tmp_path, "task.data.source=books")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "prepare_data: task.data.source is 'books', allowed are ('docs', 'sotu', 'folder', "
        "'shards')"
    )


def test_the_shipped_configuration_builds_module_and_datamodule():
    with initialize_config_module("dd_lightning.conf", version_base="1.3"):
        task = compose("config", overrides=["task=text"]).task
    module = instantiate(task.module, _convert_="all")
    datamodule = instantiate(task.data, data_slot=3, num_data_slots=4, _convert_="all")
    assert module.model.config.max_length == datamodule.data.sequence_length
    assert 100_000 < sum(p.numel() for p in module.parameters()) < 1_000_000
    assert type(module.hparams["gpt"]) is dict
