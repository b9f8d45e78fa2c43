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


@pytest.mark.parametrize("sharded", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_theta_does_not_depend_on_which_learner_is_sharded(tmp_path, sharded):
    kinds = [SINGLE, SINGLE]
    kinds[sharded] = {"inner": "fsdp2"}
    merges = {}
    for name, learners in {"mixed": kinds, "single": [SINGLE, SINGLE]}.items():
        tape = run(tmp_path / name, learners)
        merges[name] = [event["digest"] for event in tape if event["event"] == "merge"]
    assert merges["mixed"] == merges["single"] and len(set(merges["single"])) > 4
    ranks = [said(tmp_path / "mixed", sharded, rank) for rank in range(2)]
    assert ranks[0]["strategy"] == "ModelParallelStrategy"
    assert ranks[0]["digests"] == ranks[1]["digests"]
    for learner in range(2):
        mixed, single = (said(tmp_path / name, learner)["digests"] for name in merges)
        assert mixed == single
