"""Which folders are gone on with, and what of the command line a resumed run does not take."""

import json

import pytest
import yaml

from dd_lightning.launch.evaluator import _newest_evaluated
from dd_lightning.launch.resume import put_aside, read_run, without_effect
from dd_lightning.launch.settings import check
from tests.unit.test_launch_settings import resolved

pytestmark = pytest.mark.unit


@pytest.fixture
def folder(tmp_path):
    """Of an interrupted run with one cut."""
    config = {"seed": 5, "launcher": {"name": "local", "listen": "tcp://127.0.0.1:0"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "tape.jsonl").write_text("")
    (tmp_path / "summary.json").write_text(json.dumps({"status": "interrupted"}))
    (tmp_path / "syncer" / "cuts").mkdir(parents=True)
    (tmp_path / "syncer" / "cuts" / "c2.json").write_text("{}")
    return tmp_path


def test_everything_is_the_run_s_own_configuration(folder):
    for resume in ("last", "c2"):
        values = read_run(folder, resume)
        assert values["seed"] == 5 and values["launcher"]["listen"] == "tcp://127.0.0.1:0"
        assert values["launcher"]["resume"] == resume


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"launcher\.resume is 'last'.*holds no run; allowed:"):
        read_run(tmp_path, "last")


def test_a_finished_run_is_refused(folder):
    (folder / "summary.json").write_text(json.dumps({"status": "finished"}))
    with pytest.raises(ValueError, match="has finished: there is nothing to go on with"):
        read_run(folder, "last")


def test_an_unknown_cut_is_refused_with_those_that_are_there(folder):
    with pytest.raises(ValueError, match=r"no such cut; allowed: last \| c2"):
        read_run(folder, "c1")


def test_overrides_without_effect_are_named():
    given = ["experiment=smoke", "+trainer.x=1", "launcher.resume=last", "hydra.run.dir=x"]
    said = without_effect(given)
    assert [one.partition(" has no effect")[0] for one in said] == given[:2]


def test_the_setting_is_checked():
    settings = check(resolved("launcher.resume=last"))
    assert (settings.resume, settings.cut) == ("last", None)
    assert check(resolved("launcher.resume=c3")).cut == "c3"
    assert check(resolved()).resume is None
    with pytest.raises(ValueError, match=r"launcher\.resume is 7; allowed: null, last, or the id"):
        check(resolved("launcher.resume=7"))


def test_checkpoints_after_a_cut_are_put_aside_and_not_lost(tmp_path):
    for turn in range(2):
        own = tmp_path / "learners" / "0" / "checkpoints"
        own.mkdir(parents=True)
        (own / "last.ckpt").write_text(str(turn))
        (moved,) = put_aside(tmp_path, "c2")
        assert (moved / "last.ckpt").read_text() == str(turn) and not own.exists()
    assert put_aside(tmp_path, "c2") == []


def test_the_evaluator_goes_on_after_what_was_evaluated(tmp_path):
    assert _newest_evaluated(tmp_path) is None
    rows = [{"file": name, "loss": 1.0} for name in ("step-1-0.ckpt", "step-1-9.ckpt")]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert _newest_evaluated(tmp_path) == tmp_path / "syncer" / "step-1-9.ckpt"
