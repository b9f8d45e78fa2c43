"""A multirun's study: grouped by what was swept, and every mean recomputed from the summaries."""

from __future__ import annotations

import csv
import json
import math

import pytest
import yaml

from dd_lightning.cli import main
from dd_lightning.report.own_metrics import learners_mean
from dd_lightning.report.study import Spread, read_study, titles
from dd_lightning.report.study_compare import compare
from dd_lightning.report.study_measures import (
    Measured,
    StudyFacts,
    loss_at,
    measure_of,
    seconds_to_loss,
)
from dd_lightning.report.study_plan import StudyPlan
from dd_lightning.report.study_table import cell
from dd_lightning.report.summary import summarize, write_summary
from tests.tapes import Tape

pytestmark = pytest.mark.unit

RULES, SEEDS = ("average", "rda"), (1, 2, 3)


def losses(rule: str, learners: int, seed: int) -> float:
    """Of the run made up for these settings."""
    return 2.0 + 0.1 * RULES.index(rule) - 0.01 * learners + 0.003 * seed**2


@pytest.fixture
def multirun(tmp_path):
    """2 rules x (2, 10) learners x 3 seeds, as Hydra and the launcher leave them."""
    number = 0
    for learners in (10, 2):
        for rule in RULES:
            for seed in SEEDS:
                write_run(tmp_path / str(number), rule, learners, seed)
                number += 1
    return tmp_path


def write_run(folder, rule: str, learners: int, seed: int, study: dict | None = None) -> None:
    tape = Tape()
    tape.start(learners, [30, 10], study=study or {"lines": "algorithm.merge", "x": "learners"})
    for at_s in (1.0, 1.5, 2.5):
        tape.add("round_open", at_s, epoch=1, round=1, fragment=0, roster=[], quorum=1)
    points = {0.0: 5.0, 10.0: 3.0, 20.0: losses(rule, learners, seed)}
    for at_s, loss in points.items():
        tape.add(
            "evaluation",
            30.0,
            file=f"{at_s}.ckpt",
            loss=loss,
            metrics={},
            initial=at_s == 0,
            final=at_s == 20,
            checkpoint_t_s=at_s,
            tokens_merged=100.0 * at_s * learners,
        )
    tape.add("run_end", 30.0, status="finished", parameters_sha256=None, seconds=25.0 + seed)
    (folder / ".hydra").mkdir(parents=True)
    overrides = [f"learners={learners}", f"algorithm.merge={rule}", f"seed={seed}", "logger=csv"]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    config = tape.events[0]["config"] | {"seed": seed}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    tape.events[0]["seed"] = seed
    (folder / "tape.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tape.events))
    write_summary(folder, summarize(tape.events))
    (folder / "report.html").write_text("as the launcher left it")  # so it is not drawn again


@pytest.fixture
def found(multirun, capsys):
    """What the command prints with --json."""
    assert main(["report", str(multirun), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_means_and_spreads_are_those_of_the_summaries(found):
    rows = found["study"]["rows"]
    assert len(rows) == 4 and sum(len(row["runs"]) for row in rows) == 12 == len(found["runs"])
    for row in rows:
        summaries = [found["runs"][run] for run in row["runs"]]
        assert sorted(row["seeds"]) == list(SEEDS)
        mean = sum(one["loss"]["validation"] for one in summaries) / 3
        square = sum((one["loss"]["validation"] - mean) ** 2 for one in summaries)
        spread = row["measures"]["validation_loss"]
        assert spread["mean"] == pytest.approx(mean)
        assert spread["std"] == pytest.approx(math.sqrt(square / 2))
        assert spread["least"] <= spread["mean"] <= spread["most"]
        assert row["measures"]["seconds"]["mean"] == pytest.approx(27.0)
        rule, learners = row["settings"]["algorithm.merge"], row["settings"]["learners"]
        assert mean == pytest.approx(sum(losses(rule, learners, seed) for seed in SEEDS) / 3)


def test_only_what_differs_is_swept_and_the_seed_is_not(found):
    assert found["study"]["swept"] == ["learners", "algorithm.merge"]


def test_files_say_the_same_as_json(multirun, found):
    with open(multirun / "study.csv") as file:
        groups = list(csv.DictReader(file))
    with open(multirun / "study_runs.csv") as file:
        runs = list(csv.DictReader(file))
    assert len(groups) == 4 and len(runs) == 12
    for group, row in zip(groups, found["study"]["rows"], strict=True):
        loss = row["measures"]["validation_loss"]
        assert float(group["validation_loss_mean"]) == loss["mean"]
        alike = [
            float(run["validation_loss"])
            for run in runs
            if run["learners"] == group["learners"]
            and run["algorithm.merge"] == group["algorithm.merge"]
        ]
        assert sum(alike) / len(alike) == pytest.approx(loss["mean"])
    table = (multirun / "study.md").read_text().splitlines()
    assert len(table) == 2 + 4
    assert table[2].startswith("| 10 | average | 3 | 1.9140 ± ")  # the order of the jobs
    assert (multirun / "figures" / "study.png").stat().st_size > 5000


def test_a_run_that_did_not_finish_is_counted_and_not_averaged(multirun):
    summary = json.loads((multirun / "3" / "summary.json").read_text())
    summary["status"], summary["loss"]["validation"] = "failed", 99.0
    (multirun / "3" / "summary.json").write_text(json.dumps(summary))
    study = read_study([multirun / str(number) for number in range(12)])
    counts = [(len(group.runs), group.unfinished) for group in study.groups]
    assert counts == [(3, 0), (2, 1), (3, 0), (3, 0)]
    assert study.groups[1].measures["validation_loss"].most < 3


def test_runs_that_hydra_did_not_record_are_reported_one_by_one(multirun, capsys):
    for file in multirun.glob("*/.hydra/overrides.yaml"):
        file.unlink()
    assert main(["report", str(multirun)]) == 0
    assert "no study" in capsys.readouterr().err
    assert not (multirun / "study.md").exists()
    with pytest.raises(ValueError, match="what was swept is not known"):
        read_study([multirun / "0", multirun / "1"])


def facts(*points: tuple[float, float, float]) -> StudyFacts:
    made = StudyFacts()
    for at_s, tokens, loss in points:
        made.feed(
            {
                "event": "evaluation",
                "t_s": 99.0,
                "loss": loss,
                "checkpoint_t_s": at_s,
                "tokens_merged": tokens,
                "initial": at_s == 0,
            }
        )
    return made


def test_a_curve_is_read_between_its_points():
    curve = facts((0.0, 0.0, 6.0), (10.0, 100.0, 4.0), (30.0, 400.0, 2.0))
    assert loss_at(curve.evaluated, 50.0) == 5.0
    assert loss_at(curve.evaluated, 250.0) == 3.0
    assert loss_at(curve.evaluated, 401.0) is None
    assert seconds_to_loss(Measured({}, curve, target_loss=3.0)) == 20.0
    assert seconds_to_loss(Measured({}, curve, target_loss=1.0)) is None


def test_settings_of_one_short_name_are_told_apart():
    assert titles(["study.arm", "arm", "seed.x"]) == ["study.arm", "arm", "x"]
    assert titles(["algorithm.merge", "learners"]) == ["merge", "learners"]


def test_the_least_share_of_weight_is_that_of_who_is_heard_least():
    made = StudyFacts()
    for weights in ({"0": 3.0, "1": 1.0}, {"0": 8.0}, {"1": 0.0, "0": 2.0}):
        row = {"event": "merge", "t_s": 1.0, "agreement": 1.0, "contributors": list(weights)}
        made.feed(row | {"weights": list(weights.values())})
    share = measure_of("least_weight_share").of
    assert share(Measured({"per_learner": {"0": {}, "1": {}}}, made)) == pytest.approx(0.25 / 3)
    assert share(Measured({"per_learner": {"0": {}, "1": {}, "2": {}}}, made)) == 0.0
    assert share(Measured({"per_learner": {"0": {}}}, StudyFacts())) is None


def test_equal_tokens_are_those_that_every_run_has_merged(multirun):
    for folder in multirun.glob("[0-9]*"):
        config = yaml.safe_load((folder / "config.yaml").read_text())
        config["study"] = {"measures": ["loss_at_equal_tokens", "link_needed", "largest_fragment"]}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
    study = read_study([multirun / str(number) for number in range(12)])
    # 2 learners merge 4000 tokens; 10 learners have 10 000 at their second of three points
    many, few = study.groups[0].measures, study.groups[2].measures
    assert many["loss_at_equal_tokens"].mean == pytest.approx(5.0 - 2.0 * 0.4)
    assert few["loss_at_equal_tokens"].mean == pytest.approx(
        sum(losses("average", 2, seed) for seed in SEEDS) / 3
    )
    # rounds open 0.5 and 1 s apart: 30 of 40 elements, 32 bits each, within the median gap
    assert many["link_needed"].mean == pytest.approx(30 * 32 / 0.75 / 1e6)
    assert many["largest_fragment"].mean == pytest.approx(30 / 20)


@pytest.fixture
def beside_average(multirun):
    """The study of the multirun, whose baseline is the rule `average`."""

    def read(baseline: str = "average"):
        for folder in multirun.glob("[0-9]*"):
            config = yaml.safe_load((folder / "config.yaml").read_text())
            config["study"] = {"x": "algorithm.merge", "baseline": baseline}
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        return read_study([multirun / str(number) for number in range(12)])

    return read


def test_each_group_is_compared_with_the_baseline_seed_by_seed(multirun, beside_average, capsys):
    found = compare(beside_average())
    assert [one.behind is None for one in found] == [True, False, True, False]
    for one in (found[1], found[3]):
        # rda is 0.1 worse at every seed: no spread of the difference, though losses have one
        assert one.behind.mean == pytest.approx(0.1)
        assert one.behind.std == pytest.approx(0.0, abs=1e-12)
    fell = [5.0 - losses("average", 10, seed) for seed in SEEDS]
    assert found[0].fell.mean == pytest.approx(sum(fell) / 3)
    square = sum((value - sum(fell) / 3) ** 2 for value in fell)
    assert found[0].fell_in_spreads == pytest.approx(sum(fell) / 3 / math.sqrt(square / 2))
    assert main(["report", str(multirun), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["study"]["rows"]
    assert rows[1]["compared"]["behind"]["mean"] == pytest.approx(0.1)
    table = (multirun / "study.md").read_text().splitlines()
    assert table[0].endswith("| loss fell by | in spreads | behind average |")
    assert table[2].endswith(" | – |") and table[3].endswith(" | 0.1000 ± 0.0000 |")
    with open(multirun / "study.csv") as file:
        assert float(list(csv.DictReader(file))[3]["behind_mean"]) == pytest.approx(0.1)


def test_a_baseline_that_no_run_has_is_warned_of(beside_average):
    study = beside_average("averag")
    with pytest.warns(UserWarning, match="study.baseline is 'averag', but algorithm.merge is"):
        assert all(one.behind is None for one in compare(study))


def test_what_learners_say_of_their_own_weights(tmp_path):
    def life(learner: int, number: int, *rows: str) -> None:
        folder = tmp_path / "learners" / str(learner) / "csv" / f"version_{number}"
        folder.mkdir(parents=True)
        (folder / "metrics.csv").write_text("\n".join(("accuracy,step,train_loss", *rows)))

    life(0, 9, "0.5,1,", "0.6,2,")
    life(0, 10, ",3,1.5", "0.8,4,", ",5,1.4")
    life(1, 0, "0.4,4,", "nan,5,")
    assert learners_mean(tmp_path, "accuracy") == pytest.approx(0.6)
    life(2, 0, ",4,1.0")
    assert learners_mean(tmp_path, "accuracy") is None  # one of three did not say
    assert learners_mean(tmp_path / "elsewhere", "accuracy") is None


def test_one_run_has_no_spread():
    assert cell("validation_loss", None, 3) == "–"
    assert cell("validation_loss", Spread.of([1.25]), 1) == "1.2500"


def test_a_mean_of_some_runs_says_so():
    assert cell("seconds_to_loss", Spread.of([17.0, 19.0]), 3) == "18.0 ± 1.4 (2 of 3)"


def test_what_is_drawn_by_default():
    study = StudyPlan()
    assert study.drawn == ("validation_loss",)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"measures": ["validation_los"]}, "Did you mean validation_loss"),
        ({"measures": []}, "at least one"),
        ({"measures": "goodput"}, "allowed: a list"),
        ({"line": "learners"}, "Did you mean lines"),
        ({"measures": ["seconds_to_loss"]}, "study.target_loss is null"),
        ({"arm": "x", "arms": {"y": {}}}, "study.arm is 'x'; allowed: y"),
        ({"draw": ["goodput"] * 4}, "at most 3"),
        ({"timeline": [3, 1]}, "study.timeline is"),
        ({"baseline": 3}, "study.baseline is 3"),
    ],
)
def test_a_wrong_study_is_refused_by_name(values, said):
    with pytest.raises(ValueError, match=said):
        StudyPlan.load(values)


def test_any_metric_of_the_task_is_a_measure():
    losses = {"validation_loss_era_a": 2.0, "validation_loss_era_b": 3.0, "bits_per_byte": 9.0}
    run = Measured({"metrics": losses})
    assert measure_of("metrics.validation_loss_era_a").of(run) == 2.0
    assert measure_of("metrics.other").of(run) is None
    assert measure_of("worst_group_loss").of(run) == 3.0
    assert measure_of("worst_group_loss").of(Measured({"metrics": {}})) is None
    with pytest.raises(ValueError, match=r"study.measures has 'metric.x'; allowed: .*metrics.NAME"):
        StudyPlan(measures=("metric.x",))
