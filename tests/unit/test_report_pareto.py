"""Fronts of loss against cost, and the study's page."""

import json

import pytest
import yaml

from dd_lightning.cli import main
from dd_lightning.report import study_figures
from dd_lightning.report.pareto import Point, costs_of, front, points, write_pareto
from dd_lightning.report.study import Study, read_study
from dd_lightning.report.study_page import answer, question, render_study
from dd_lightning.report.study_plan import StudyPlan
from dd_lightning.report.style import house_style
from tests.sweeps import MadeUpRuns

pytestmark = pytest.mark.unit

FAULT = {"event": "fault", "t_s": 5.0, "kind": "kill", "target": "0", "planned": {}, "fired": True}


@pytest.fixture
def folders(tmp_path):
    """3 learning rates x 2 seeds; the higher the rate, the longer, and the more faults."""
    made, folders = MadeUpRuns(), []
    for lr in (0.1, 0.5, 0.9):
        for seed in (1, 2):
            folder = tmp_path / str(len(folders))
            folder.mkdir()
            task = {"name": "text <b>"}
            outer = {"outer": {"lr": lr}}
            made.play(folder, {"learners": 2, "seed": seed, "task": task, "algorithm": outer})
            given = {"sha256": "", "overrides": [f"algorithm.outer.lr={lr}", f"seed={seed}"]}
            (folder / "job.json").write_text(json.dumps(given))
            summary = json.loads((folder / "summary.json").read_text())
            summary["seconds"] = 40.0 - 10.0 * lr
            (folder / "summary.json").write_text(json.dumps(summary))
            with open(folder / "tape.jsonl", "a") as tape:
                tape.writelines(json.dumps(FAULT) + "\n" for _ in range(int(lr * 10)))
            (folder / "report.html").write_text("younger than the tape: not drawn again")
            folders.append(folder)
    return folders


@pytest.fixture
def study(folders):
    return read_study(folders)


def at(*places: tuple[float, float]) -> list[Point]:
    return [Point(None, cost, loss) for cost, loss in places]  # type: ignore[arg-type]


def places(found: list[Point]) -> list[tuple[float, float]]:
    return [(point.cost, point.loss) for point in found]


def test_the_front_is_those_that_no_other_beats():
    cloud = at((3, 1.0), (1, 3.0), (2, 2.0), (2, 2.5), (3, 1.5), (4, 1.0), (2.5, 2.0))
    assert places(front(cloud, "seconds")) == [(1, 3.0), (2, 2.0), (3, 1.0)]
    for one in cloud:  # by the definition
        beaten = any(
            two.cost <= one.cost
            and two.loss <= one.loss
            and (two.cost, two.loss) != (one.cost, one.loss)
            for two in cloud
        )
        assert beaten != (one in front(cloud, "seconds"))


def test_more_faults_withstood_is_better():
    cloud = at((0, 2.0), (5, 2.1), (5, 2.0), (9, 2.4), (7, 2.5))
    assert places(front(cloud, "faults")) == [(5, 2.0), (9, 2.4)]


def test_points_are_the_means_of_groups_and_equal_costs_are_left_out(study):
    assert costs_of(study) == ["seconds", "faults"]  # all sent as many bytes: none
    assert places(points(study, "seconds")) == [
        (pytest.approx(40.0 - 10.0 * lr), pytest.approx(2.0015 + lr / 10)) for lr in (0.1, 0.5, 0.9)
    ]
    assert [point.cost for point in points(study, "faults")] == [1.0, 5.0, 9.0]


def test_the_figure_is_drawn_or_not(study, folders, tmp_path):
    with house_style():
        (picture,) = write_pareto(tmp_path, study)
        assert picture.stat().st_size > 5000 and picture.with_suffix(".svg").exists()
        alike = Study(study.plan, study.swept, study.groups[:1])
        assert write_pareto(tmp_path / "none", alike) == []


def test_the_page_answers_the_study_s_question_at_the_top(study, tmp_path):
    assert question(study) == "What does lr change?"
    said = answer(study)
    assert said.startswith("6 runs of 3 settings. Validation loss of Θ: from 2.0115 ± 0.0007 (lr ")
    assert "113.1 times the spread over seeds" in said
    assert "On the front of loss and time: lr 0.9; lr 0.5; lr 0.1." in said
    page = render_study(study, tmp_path, [])
    assert page.index("What does lr change?") < page.index("6 runs of 3") < page.index("<table>")
    assert "text &lt;b&gt;" in page and "text <b>" not in page
    assert page.count("<tr>") == 1 + 3


def test_the_experiment_s_own_question_stands_there(study):
    asked = Study(StudyPlan(question="Is it so?"), study.swept, study.groups)
    assert question(asked) == "Is it so?"


def test_the_command_writes_the_page_and_csv_with_every_cost(
    folders, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(study_figures, "write_pareto", lambda *given: [])  # drawn above
    assert main(["report", str(tmp_path)]) == 0
    assert str(tmp_path / "study.html") in capsys.readouterr().out
    head = (tmp_path / "study.csv").read_text().splitlines()[0].split(",")
    for name in ("validation_loss", "seconds", "bytes", "faults"):
        assert f"{name}_mean" in head and f"{name}_std" in head
    config = yaml.safe_load((folders[0] / "config.yaml").read_text())
    config["study"] = {"measures": ["goodput"]}
    (folders[0] / "config.yaml").write_text(yaml.safe_dump(config))
    assert read_study(folders).columns == (
        "goodput",
        "validation_loss",
        "seconds",
        "bytes",
        "faults",
    )
