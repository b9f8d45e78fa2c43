"""Learners that are groups of processes: ranks agree, and a run cannot tell the kinds apart."""

import pytest

from tests.conformance.jobs import run, said

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]

SINGLE = {"inner": "auto", "devices": 1, "accumulate": 2}  # a micro-batch of each rank a step


def test_two_learners_of_two_ddp_ranks_are_bitwise_two_single_ones(tmp_path):
    run(tmp_path / "groups", [{}, {}])
    tape = run(tmp_path / "single", [SINGLE, SINGLE])
    assert any(event["event"] == "merge" for event in tape)
    for learner in range(2):
        ranks = [said(tmp_path / "groups", learner, rank) for rank in range(2)]
        assert ranks[0]["digests"] == ranks[1]["digests"]
        assert ranks[0]["digests"] == said(tmp_path / "single", learner)["digests"]
        assert len(set(ranks[0]["digests"])) == len(ranks[0]["digests"])
