"""`scripts/evaluate.py` on what a run leaves: its folder, a checkpoint, both formats of export."""

import importlib.util
import json
from pathlib import Path

import pytest

from dd_lightning.cli import main as dd_lightning
from dd_lightning.launch.task import check_task
from dd_lightning.simulate.data_parallel import DataParallelRun
from dd_lightning.syncer.checkpoint import newest_checkpoint
from dd_lightning.tasks.evaluation.reviews import PACKAGE, Review, write_reviews
from tests.simulated_runs import TINY, Silent, settings_of, simulate

pytestmark = pytest.mark.integration

SCRIPT = Path(__file__).parents[2] / "scripts" / "evaluate.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("evaluate_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Two short runs, and a cache with a few reviews in the place of those that pip gets."""
    folder = tmp_path_factory.mktemp("evaluate")
    simulate(folder / "data", folder / "run", "trainer.max_steps=24")
    base = [one for one in TINY if not one.startswith("algorithm.")]
    job = ("algorithm=data_parallel", "algorithm.fragments=1", "trainer.max_steps=24")
    settings = settings_of(folder / "data", *job, base=base)
    data = check_task(settings.values, settings.syncer.num_data_slots)
    run = DataParallelRun(settings, folder / "parallel", data, Silent(), draw=False)
    assert run.execute().status == "finished"
    reviews = folder / "cache" / f"reviews-{PACKAGE.version}"
    reviews.mkdir(parents=True)
    texts = [
        Review(("dull ", "fine ")[i % 2] * 3 + "film " * (i % 5), i % 2 == 1) for i in range(60)
    ]
    write_reviews(reviews, texts)
    return folder


def answers(script, capsys, *arguments) -> dict:
    capsys.readouterr()
    assert script([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_and_what_was_exported_of_it_have_the_same_answers(script, home, capsys):
    checkpoint = newest_checkpoint(home / "run" / "syncer")
    exported = home / "elsewhere" / "model.safetensors"
    assert dd_lightning(["export", str(checkpoint)]) == 0
    command = ["export", str(checkpoint), "--out", str(exported), "--format", "safetensors"]
    assert dd_lightning(command) == 0
    asked = ("--reviews", "frozen", "--cache-dir", home / "cache")
    found = [
        answers(script, capsys, *which, *asked)
        for which in (
            (home / "run",),
            (checkpoint,),
            (checkpoint.with_name(f"{checkpoint.stem}-exported.ckpt"),),
            (exported, "--run", home / "run"),
        )
    ]
    assert len({one["model"] for one in found}) == 3
    assert all({**one, "model": ""} == {**found[0], "model": ""} for one in found)
    first = found[0]
    summary = json.loads((home / "run" / "summary.json").read_text())
    assert first["validation"]["val_loss"] == pytest.approx(summary["loss"]["validation"])
    assert first["validation"]["bits_per_byte"] == summary["metrics"]["bits_per_byte"]
    assert first["reviews"]["frozen"]["mean"] > 0.9  # the first word tells
    assert first["references"]["reviews"]["majority"] == 0.504


def test_a_data_parallel_job_and_the_model_as_it_began(script, home, capsys):
    trained = answers(script, capsys, home / "parallel")
    began = answers(script, capsys, home / "parallel", "--untrained")
    assert "learners/0/checkpoints" in trained["model"] and began["model"] == "untrained"
    assert trained["validation"]["val_loss"] < 0.95 * began["validation"]["val_loss"]
    capsys.readouterr()
    assert script([str(home / "parallel")]) == 0
    assert "validation: bits per byte" in capsys.readouterr().out


def test_what_cannot_be_evaluated_is_told_in_one_line(script, home, capsys, tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"nothing")
    for arguments, said in (
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path / "x.ckpt"], "give --run, the folder of the run"),
        ([tmp_path / "x.ckpt", "--run", home / "run"], "a file that a syncer wrote"),
        ([tmp_path], "has no config.yaml"),
        ([home / "run", "--text", "books"], "text is 'books', allowed are"),
    ):
        capsys.readouterr()
        assert script([*map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and said in error
