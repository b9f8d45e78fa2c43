"""Points and notes from tape events: which, in which contexts, and their thinning."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from dd_lightning.report.points import Point, Points, notes_of
from dd_lightning.report.run_description import hparams_of, tags_of
from tests.fleet_tapes import fleet_tape
from tests.tapes import Tape, small_tape

pytestmark = pytest.mark.unit


def points_of(events: list[dict], least_interval_s: float = 0.0) -> list[Point]:
    points = Points(least_interval_s)
    return [point for event in events for point in points.of(event)]


def values(points: list[Point], name: str, **context: Any) -> list[float]:
    return [p.value for p in points if p.name == name and p.context == context]


def test_points_of_the_small_tape() -> None:
    points = points_of(small_tape())
    assert [p.value for p in points if p.name == "contributors"] == [2, 1, 1]
    assert values(points, "train_loss", learner="0") == [2.0, 1.0]
    assert values(points, "tokens_per_s", learner="0") == [(8000 - 3000) / 7.0]
    assert values(points, "outer_norm", fragment=0) == [0.5, 0.5]
    assert values(points, "staleness", learner="1") == [0]  # the late one has none
    assert values(points, "validation_loss", subset="validation") == [5.5, 4.0, 3.25]
    assert values(points, "bytes_up", process="syncer")[-1] == 9000 + 1000 + 2000
    own = [values(points, "bytes_up", learner=learner)[-1] for learner in ("0", "1")]
    assert sum(own) == 9000 + 1000 + 2000


def test_a_merge_says_all_of_its_round_by_fragment_and_by_learner() -> None:
    tape = Tape()
    norms, weights = {"0": 2.0, "1": 3.0}, [3.0, 1.0]
    tape.merge(5.0, 7, 2, 1, ["0", "1"], weights=weights, cosine=-0.25, norms=norms, merge_s=0.01)
    found = points_of(tape.events)
    assert all(point.step == 7 and point.axis == "round" for point in found)
    assert {p.name: p.value for p in found if p.context == {"fragment": 2}} == {
        "contributors": 2,
        "grace_s": 0.1,
        "quorum_s": 0.2,
        "merge_s": 0.01,
        "agreement": 0.8,
        "cosine": -0.25,
        "outer_norm": 0.5,
    }
    assert {p.name: p.value for p in found if p.context == {"learner": "0"}} == {
        "weight": 3.0,
        "weight_share": 0.75,
        "contribution_norm": 2.0,
    }
    assert values(found, "run_seconds", process="syncer") == [5.0]


def test_faults_are_counted_and_said_at_their_time() -> None:
    tape = Tape()
    tape.join(1.0, "0")
    tape.state(2.0, "0", "training")
    tape.add("dead", 9.0, learner="0", generation=1, cause="connection closed")
    tape.add("fault", 8.5, kind="kill_learner", target="learner 0", planned={"t_s": 8}, fired=True)
    tape.add("fault", 0.0, kind="flap", target="learner 1", planned={"t_s": 90}, fired=None)
    points = points_of(tape.events)
    assert values(points, "learners_training", process="syncer") == [1, 0]
    assert [(p.value, p.step) for p in points if p.name == "faults"] == [(1, 8)]
    notes = [note for event in tape.events for note in notes_of(event)]
    assert [(note.kind, note.at_s) for note in notes[:3]] == [
        ("join", 1.0),
        ("dead", 9.0),
        ("fault", 8.5),
    ]
    assert notes[2].text == "kill_learner, learner 0"
    assert "did not fire" in notes[3].text


def test_a_new_incarnation_has_no_negative_rate() -> None:
    assert all(p.value >= 0 for p in points_of(fleet_tape(2, 40)) if p.name == "tokens_per_s")


def test_series_are_thinned_by_the_runs_time_but_evaluations_are_not() -> None:
    events = fleet_tape(2, 100)
    seconds = max(event["t_s"] for event in events)
    thin = points_of(events, least_interval_s=10.0)
    counts = Counter((p.name, *p.context.items()) for p in thin if p.name != "validation_loss")
    del counts[("bits_per_byte", ("subset", "validation"))]
    assert max(counts.values()) <= seconds / 10.0 + 1
    assert len(values(thin, "validation_loss", subset="validation")) == 11


def test_null_and_not_finite_values_make_no_point() -> None:
    tape = Tape()
    tape.stats(2.0, "0", 10, 100, loss=None, rtt_ms_p50=float("nan"))
    assert {p.name for p in points_of(tape.events)} == {"step_seconds", "bytes_up", "bytes_down"}


def test_tags_and_hparams_of_a_configuration() -> None:
    config = {
        "mode": "simulate",
        "learners": 4,
        "seed": 1,
        "task": {"name": "text"},
        "network": {"name": "us_eu"},
        "chaos": {"name": "none"},
        "algorithm": {
            "preset": "paper",
            "merge": {"_target_": "my.rules.Median"},
            "outer": {"_target_": "torch.optim.SGD", "lr": 0.7},
            "quorum": 1,
        },
        "trainer": {"max_steps": 500},
        "budget": {"tokens": None},
    }
    assert tags_of(config, "demo") == [
        "experiment=demo",
        "task=text",
        "algorithm=paper",
        "network=us_eu",
        "chaos=none",
        "mode=simulate",
    ]
    assert hparams_of(config) == {
        "mode": "simulate",
        "learners": 4,
        "seed": 1,
        "task": "text",
        "network": "us_eu",
        "chaos": "none",
        "preset": "paper",
        "merge": "Median",
        "quorum": 1,
        "outer": "SGD",
        "max_steps": 500,
    }
    assert tags_of({}, "demo") == ["experiment=demo"]  # a syncer without the launcher's config


def test_a_learner_that_makes_no_step_adds_none_to_its_curves() -> None:
    tape = Tape()
    for t_s, step, odometer in ((2.0, 10, 1000), (4.0, 10, 1000), (6.0, 20, 2000)):
        tape.stats(t_s, "0", step, odometer, loss=1.0)
    points = points_of(tape.events)
    assert [p.step for p in points if p.name == "train_loss"] == [10, 20]
    assert values(points, "tokens_per_s", learner="0") == [250.0]  # its pause counts
