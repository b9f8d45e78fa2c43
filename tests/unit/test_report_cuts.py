"""A tape of a run that was restored as a whole counts the final lineage only."""

from __future__ import annotations

import pytest

from dd_lightning.report.lives import Lives
from dd_lightning.report.tokens import Tokens

pytestmark = pytest.mark.unit


def test_losses_and_merges_after_the_cut_are_undone() -> None:
    tokens = Tokens()
    row = {"epoch": 1, "round": 1, "fragment": 0, "learner": "0", "tokens": 10}
    lost = {"event": "lost", "learner": "0", "fragment": 0, "tokens": 3, "cause": "overlap"}
    tokens.feed({"event": "layout", "elements": [2]})
    tokens.feed({"event": "contribution", "verdict": "accepted", **row})
    tokens.feed({"event": "merge", "version": [1, 1], **row})
    tokens.feed(lost)
    tokens.feed({"event": "cut", "cut": "c1", "state": "recorded"})
    tokens.feed({"event": "contribution", "verdict": "accepted", **row, "round": 2})
    tokens.feed({"event": "merge", "version": [1, 2], **row, "round": 2})
    tokens.feed(lost)
    assert tokens.ledger("0", 30) == [{"processed": 30, "merged": 20, "lost": 6, "pending": 4}]
    for _ in range(2):  # a cut may be restored again and again
        start = {"event": "syncer_start", "epoch": 2, "versions": [[2, 1]]}
        tokens.feed(start | {"restored_from": "c1"})
        assert tokens.ledger("0", 20) == [{"processed": 20, "merged": 10, "lost": 3, "pending": 7}]
        assert tokens.lost_by_cause["0"]["overlap"] == 6  # times the elements
        tokens.feed(lost)


def test_an_account_that_is_carried_on_counts_once() -> None:
    lives = Lives()
    join = {"event": "join", "t_s": 0.0, "learner": "0", "generation": 1, "continues": False}
    stats = {"event": "learner_stats", "t_s": 1.0, "learner": "0", "generation": 1, "step": 5}
    lives.feed({"event": "syncer_start", "epoch": 1})
    lives.feed(join | {"incarnation": "a"})
    lives.feed(stats | {"odometer": 50})
    lives.feed({"event": "syncer_start", "epoch": 2})
    lives.feed(join | {"incarnation": "b", "former": "a", "generation": 2, "continues": True})
    lives.feed(stats | {"odometer": 60, "generation": 2})
    assert lives.learners["0"].odometer == 60
