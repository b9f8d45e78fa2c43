"""What the syncer tells its operator about a run, and that it tells it once."""

import pytest

from tests.fleet import Fleet, Spec

pytestmark = pytest.mark.unit


def said(fleet: Fleet, what: str) -> list[str]:
    return [text for text in fleet.warnings if what in text]


def test_a_late_apply_is_named_with_the_h_that_would_do():
    specs = [Spec(steps=160, latency=2.0) for _ in range(2)]
    fleet = Fleet(specs, algorithm={"fragments": 4, "sync_every": 8}).run()
    (text,) = said(fleet, "after the snapshot")
    assert "sync_every=8" in text and "algorithm.apply=rebase" in text


def test_nothing_is_said_where_the_link_is_fast():
    specs = [Spec(steps=160, latency=0.05) for _ in range(2)]
    fleet = Fleet(specs, algorithm={"fragments": 4, "sync_every": 12}).run()
    assert fleet.warnings == []


def test_merges_that_come_too_seldom_are_named_with_the_bandwidth_that_would_do():
    specs = [Spec(steps=200, transfer=6.0) for _ in range(2)]
    fleet = Fleet(specs, algorithm={"fragments": 4, "sync_every": 8}).run()
    (text,) = said(fleet, "is merged every")
    assert "times the bandwidth" in text


def test_a_learner_that_misses_most_rounds_is_named_with_its_cause():
    specs = [Spec(steps=300) for _ in range(3)] + [Spec(steps=300, step_s=9.0)]
    fleet = Fleet(specs, algorithm={"fragments": 2, "sync_every": 4}).run()
    (text,) = said(fleet, "learner 3 contributed to")
    assert "its step" in text


@pytest.mark.parametrize("quorum", [1, 2])
def test_a_downlink_slower_than_the_merges_is_named_and_a_larger_quorum_would_do(quorum):
    specs = [Spec(steps=100), Spec(steps=100, down=5.0)]  # two fragments are merged every 4 steps
    algorithm = {"fragments": 2, "sync_every": 4, "quorum": quorum}
    fleet = Fleet(specs, algorithm=algorithm).run(110.0)
    merged = fleet.core.run.ledger("1")[0]["merged"]
    if quorum == 2:
        assert merged > 0 and said(fleet, "learner 1 contributed to") == []
    else:
        (text,) = said(fleet, "learner 1 contributed to 0 of")
        assert merged == 0 and "algorithm.quorum to 2" in text and "sync_every=4" in text
