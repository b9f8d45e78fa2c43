"""A tape may end at any line: its summary is valid and its tokens add up all the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dd_lightning.report.summary import RunReader, summarize
from tests.fleet_tapes import fleet_tape
from tests.tapes import assert_valid, small_tape

pytestmark = pytest.mark.property


def check(summary: dict) -> None:
    assert_valid(summary)
    for learner in summary["per_learner"].values():
        for entry in learner["ledger"]:
            assert entry["processed"] == entry["merged"] + entry["lost"] + entry["pending"]
        parts = sum(learner[f"tokens_{kind}"] for kind in ("merged", "lost", "pending"))
        assert parts == pytest.approx(learner["tokens"])
        assert learner["seconds_alive"] >= 0


@pytest.mark.parametrize("events", [small_tape(), fleet_tape(2, 9)], ids=["small", "fleet"])
def test_every_prefix_gives_a_valid_summary(events: list[dict]) -> None:
    reader = RunReader()
    check(reader.summary())
    for event in events:
        reader.feed(event)
        check(reader.summary())


@settings(max_examples=25, deadline=None)
@given(
    learners=st.integers(1, 5),
    rounds=st.integers(1, 25),
    fragments=st.integers(1, 6),
    seed=st.integers(0, 10_000),
    share=st.floats(0, 1),
)
def test_any_fleet_cut_anywhere(
    learners: int, rounds: int, fragments: int, seed: int, share: float
) -> None:
    events = fleet_tape(learners, rounds, fragments=fragments, seed=seed)
    check(summarize(events[: round(share * len(events))]))


def test_rounds_never_fall_as_the_tape_grows() -> None:
    events = fleet_tape(2, 12)
    counts = [summarize(events[:end])["rounds"] for end in range(0, len(events), 7)]
    assert all(before <= after for before, after in pairwise(counts))
