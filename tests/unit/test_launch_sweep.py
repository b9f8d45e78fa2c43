"""A sweep's jobs are known by their configuration: skipped, redone, each in a folder of its own."""

import json

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from dd_lightning.launch import app, leftovers, sweep
from dd_lightning.launch.sweep import JOB, find_or_take, fingerprint, open_job, take
from dd_lightning.report.objective import check_objective, objective_of
from dd_lightning.report.study import read_study
from dd_lightning.report.study_plan import StudyPlan
from tests.sweeps import MadeUpRuns, stamps, summaries

pytestmark = pytest.mark.unit


@pytest.fixture
def runs(monkeypatch):
    """Runs that cost nothing."""
    made = MadeUpRuns()
    monkeypatch.setattr(app, "_play", made.play)
    monkeypatch.setattr("sys.argv", ["dd-lightning launch"])
    yield made
    GlobalHydra.instance().clear()


@pytest.fixture
def launch(runs, tmp_path, capsys):
    """Calls `dd-lightning launch -m` with overrides; gives what was printed."""

    def run(*overrides: str) -> str:
        quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
        app.main(["-m", f"hydra.sweep.dir={tmp_path / 'sweep'}", *quiet, *overrides])
        return capsys.readouterr().out

    return run


def test_finished_jobs_are_skipped_also_where_added_values_renumber_them(launch, runs, tmp_path):
    said = launch("algorithm.outer.lr=0.5,0.7")
    assert f"hydra.sweep.dir={tmp_path / 'sweep'} goes on with it" in said
    assert [name for name, *_ in runs.played] == ["0", "1"]
    before = stamps(tmp_path / "sweep")
    said = launch("algorithm.outer.lr=0.4,0.5,0.7")
    assert said.count("skipped: ") == 2 and "sweep/0 has finished; objective 2.05" in said
    assert runs.played[2:] == [("2", 1, 0.4)]  # "0" is that of 0.5
    after = stamps(tmp_path / "sweep")
    assert len(after) == 3 and {name: after[name] for name in before} == before
    study = read_study(sorted((tmp_path / "sweep").glob("[0-9]*")))
    for group in study.groups:  # each folder's record of its overrides is of its own run
        (run,) = group.runs
        loss = 2.001 + group.settings["algorithm.outer.lr"] / 10
        assert run.summary["loss"]["validation"] == pytest.approx(loss)


def test_a_failed_job_is_played_anew_in_an_emptied_folder(launch, runs, tmp_path, capsys):
    runs.fails_at = {2}
    with pytest.raises(SystemExit):
        launch("seed=1,2")
    assert {one["status"] for one in summaries(tmp_path / "sweep").values()} == {
        "finished",
        "failed",
    }
    runs.fails_at = set()
    capsys.readouterr()
    said = launch("seed=1,2")
    assert [seed for _, seed, _ in runs.played] == [1, 2, 2]
    assert "earlier start failed: anew in" in said and said.count("skipped: ") == 1
    assert {one["status"] for one in summaries(tmp_path / "sweep").values()} == {"finished"}


def test_one_that_was_cut_short_goes_on_where_that_is_asked_for(
    launch, runs, tmp_path, monkeypatch
):
    folder = tmp_path / "sweep" / "0"
    resumed = []
    monkeypatch.setattr(
        app, "_play", lambda at, values: resumed.append((at, values["launcher"]["resume"]))
    )
    launch("seed=1")
    (folder / "tape.jsonl").write_text("")
    (folder / "syncer").mkdir()
    (folder / "syncer" / "step-1-3.ckpt").write_text("")
    launch("seed=1,2", "launcher.resume=last")  # the second has nothing to go on with
    assert resumed[1:] == [(folder, "last"), (tmp_path / "sweep" / "1", None)]


def test_optuna_is_given_objectives_of_skipped_jobs_too(launch, runs, tmp_path):
    settings = ["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=1", "hydra.sweeper.sampler.seed=1"]
    settings += ["algorithm.outer.lr=interval(0.3,0.9)", "hydra.sweeper.n_trials=2"]
    launch(*settings)
    first = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert len(runs.played) == 2
    assert first["best_value"] == pytest.approx(2.001 + min(lr for *_, lr in runs.played) / 10)
    (tmp_path / "sweep" / "optimization_results.yaml").unlink()
    said = launch(*settings)
    again = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())
    assert again == first and len(runs.played) == 2 and said.count("skipped: ") == 2


def test_a_subdir_that_two_jobs_share_is_refused(launch, runs, capsys):
    with pytest.raises(SystemExit) as ended:
        launch("seed=1,2", "hydra.sweep.subdir=all")
    assert ended.value.code == 2
    assert "holds a job of another configuration; allowed: ${job_folder" in capsys.readouterr().err


def test_a_fingerprint_is_of_what_is_run():
    values = {"seed": 1, "launcher": {"resume": None, "keys": False}, "speeds": [1, 0.5]}
    assert fingerprint(values) == fingerprint(dict(reversed(values.items())))
    assert fingerprint(values) == fingerprint(
        values | {"launcher": {"keys": False, "resume": "last"}}
    )
    assert fingerprint(values) != fingerprint(values | {"seed": 2})
    assert fingerprint({1: "a", "b": 2}) == fingerprint({"b": 2, 1: "a"})


def test_a_folder_is_one_job_s(tmp_path):
    assert take(tmp_path / "0", "a", ["seed=1"]) and take(tmp_path / "0", "a", [])
    assert not take(tmp_path / "0", "b", [])
    assert find_or_take(tmp_path, 0, "b", []) == "1"
    assert find_or_take(tmp_path, 7, "a", []) == "0"
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "tape.jsonl").write_text("of an earlier version, without a mark")
    assert find_or_take(tmp_path, 7, "c", []) == "8"
    assert take(tmp_path / "9", "c", [])  # the same began twice at once; one has finished
    (tmp_path / "9" / "summary.json").write_text(json.dumps({"status": "finished"}))
    assert find_or_take(tmp_path, 7, "c", []) == "9"
    assert json.loads((tmp_path / "0" / JOB).read_text())["overrides"] == ["seed=1"]


def test_a_job_that_another_process_plays_is_waited_for(tmp_path, monkeypatch, capsys):
    asked = []

    def flock(file, operation):
        asked.append(operation)
        if operation & sweep.fcntl.LOCK_NB:
            raise BlockingIOError

    monkeypatch.setattr(sweep.fcntl, "flock", flock)
    with open_job(tmp_path / "0", {"seed": 1}, []) as job:
        assert not job.begun and not job.finished
    assert asked[1:] == [sweep.fcntl.LOCK_EX]
    assert "waiting: another process plays" in capsys.readouterr().out


def test_processes_of_an_earlier_start_are_awaited_then_named(tmp_path, monkeypatch):
    left = [[7, 8], [7], []]
    monkeypatch.setattr(leftovers, "leftovers", lambda folder: left.pop(0))
    leftovers.await_leftovers(tmp_path)
    assert left == []
    monkeypatch.setattr(leftovers, "leftovers", lambda folder: [7, 8])
    with pytest.raises(ValueError, match="whose processes 7, 8 are still running"):
        leftovers.await_leftovers(tmp_path, timeout_s=0.0)


def test_an_objective_is_a_measure_of_the_run(tmp_path):
    values = {"seed": 3, "learners": 2, "task": {"name": "text"}}
    MadeUpRuns().play(tmp_path, values | {"algorithm": {"outer": {"lr": 0.5}}})
    assert objective_of(tmp_path, values) == pytest.approx(2.053)
    assert objective_of(tmp_path, values | {"objective": ["seconds", "validation_loss"]}) == [
        25.0,
        pytest.approx(2.053),
    ]
    assert objective_of(tmp_path, values | {"objective": "metrics.recall"}) is None  # has none


def test_joblib_with_one_job_at_a_time_plays_them_in_the_sweep_itself(launch, runs):
    """[ended as a worker that had lost its sweep, with 130 at the first job]"""
    launch("hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "algorithm.outer.lr=0.5,0.7")
    assert [name for name, *_ in runs.played] == ["0", "1"]


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ("goodputt", "Did you mean goodput"),
        (7, "allowed: a measure, or a list of some"),
        ([], "allowed: a measure"),
        ([7], "objective is 7; allowed: "),
        ("loss_at_equal_tokens", "objective is 'loss_at_equal_tokens'; allowed: "),
        ("seconds_to_loss", r"study\.target_loss is null"),
    ],
)
def test_a_wrong_objective_is_refused(objective, said):
    with pytest.raises(ValueError, match=said):
        check_objective(objective, StudyPlan())
