"""Learners that are groups of processes: ranks agree, and a run cannot tell the kinds apart."""

import json

import pytest

from tests.conformance.jobs import run, said

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable"),
]

SCHEDULED = 5  # rounds, one every two steps, before the 12th, with which a learner is finishing
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


@pytest.mark.parametrize(
    ("sharded", "inner", "strategy"),
    [
        (0, "fsdp2", "ModelParallelStrategy"),
        (1, "fsdp", "FSDPStrategy"),
        pytest.param(1, "fsdp2", "ModelParallelStrategy", marks=pytest.mark.slow),
        pytest.param(0, "fsdp", "FSDPStrategy", marks=pytest.mark.slow),
    ],
)
def test_theta_does_not_depend_on_which_learner_is_sharded(tmp_path, sharded, inner, strategy):
    kinds = [SINGLE, SINGLE]
    kinds[sharded] = {"inner": inner}
    merges = {}
    for name, learners in {"mixed": kinds, "single": [SINGLE, SINGLE]}.items():
        tape = run(tmp_path / name, learners)
        digests = [event["digest"] for event in tape if event["event"] == "merge"]
        merges[name] = digests[:SCHEDULED]  # the end takes what comes in time
    assert merges["mixed"] == merges["single"] and len(set(merges["single"])) == SCHEDULED
    ranks = [said(tmp_path / "mixed", sharded, rank) for rank in range(2)]
    assert ranks[0]["strategy"] == strategy
    assert ranks[0]["digests"] == ranks[1]["digests"]
    for learner in range(2):
        mixed, single = (said(tmp_path / name, learner)["digests"] for name in merges)
        assert mixed == single


@pytest.mark.parametrize("inner", ["fsdp2", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_sharded_rank_never_holds_more_than_a_fragment_in_full(tmp_path, inner):
    width, mib = 400_000, 2**20
    run(tmp_path / "run", [{"inner": inner, "width": width, "lr": 1e-7, "measured": True}])
    largest = 4 * max(3 * width, 2 * width + 1)  # of the two fragments, in float32
    for rank in range(2):
        peaks = said(tmp_path / "run", 0, rank)["peaks"]
        assert max(peaks) <= largest + mib
        in_place = inner == "fsdp" and rank > 0  # slices are received where they belong
        assert max(peaks) > (0 if in_place else mib)  # what is counted is what happens


ONE = {"devices": 1, "accumulate": 2}
SHARDED = {"state_dict_type": "sharded"}


@pytest.mark.filterwarnings("ignore:the checkpoint has random states of 2 ranks")
@pytest.mark.parametrize(
    ("first_life", "next_life"),
    [
        ({"inner": "ddp"}, ONE | {"inner": "auto"}),
        # a directory, which Lightning's single device does not read
        ({"inner": "fsdp2"}, ONE | {"inner": "auto"}),
        pytest.param({"inner": "ddp"}, {}, marks=pytest.mark.slow),
        pytest.param({"inner": "fsdp2", "hydra": True}, {}, marks=pytest.mark.slow),
        pytest.param({"inner": "fsdp2"}, {"inner": "ddp"}, marks=pytest.mark.slow),
        pytest.param(
            {"inner": "fsdp2", "file": True, "hydra": True}, ONE | {"inner": "auto"},
            marks=pytest.mark.slow,
        ),
        pytest.param({"inner": "fsdp2", "file": True}, {}, marks=pytest.mark.slow),
        pytest.param({"inner": "fsdp", "options": SHARDED}, {}, marks=pytest.mark.slow),
        pytest.param(
            {"inner": "fsdp", "options": SHARDED}, ONE | {"inner": "auto"}, marks=pytest.mark.slow
        ),
        pytest.param({"inner": "fsdp"}, ONE | {"inner": "auto"}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_group_goes_on_from_its_checkpoint(tmp_path, first_life, next_life):
    tape = run(tmp_path / "run", [{**first_life, "die_at": 6, "next_life": next_life}])
    first, second = (event for event in tape if event["event"] == "join")
    assert (first["state_from"], second["state_from"]) == ("cold", "checkpoint")
    assert (second["state_step"], first["ranks"]) == (6, 2)
    assert second["ranks"] == next_life.get("devices", 2)
    ranks = [said(tmp_path / "run", 0, rank)["digests"] for rank in range(second["ranks"])]
    assert all(len(digests) == 1 + 6 and digests == ranks[0] for digests in ranks)
    ledger = [event for event in tape if event["event"] == "ledger"][-1]
    assert all(row["processed"] == row["merged"] + row["lost"] for row in ledger["fragments"])
    died = [json.loads((tmp_path / "run" / f"0-{rank}-died.json").read_text()) for rank in range(2)]
    assert died[0]["rng"] != died[1]["rng"] and died[0]["optimizer"] == died[1]["optimizer"]
    for rank in range(second["ranks"]):
        assert said(tmp_path / "run", 0, rank)["continued"] == died[rank]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("receiver", "donor"),
    [
        ({"inner": "ddp"}, SINGLE),
        ({"inner": "fsdp"}, {"inner": "fsdp2"}),
        ({"inner": "fsdp2"}, {"inner": "fsdp"}),
    ],
)
def test_a_group_that_lost_its_state_takes_a_peers(tmp_path, receiver, donor):
    second_life = {"resume": False, "steps": 3000, "own_steps": 8}
    lost = receiver | {"die_at": 6, "next_life": second_life}
    donor = donor | {"steps": 1500, "until": "0-1.json"}  # the other's second life has ended
    tape = run(tmp_path / "run", [lost, donor], wait="never", quorum=1)
    first, second = (e for e in tape if e["event"] == "join" and e["learner"] == "0")
    assert (first["state_from"], second["state_from"], second["ranks"]) == ("cold", "peer", 2)
    ranks = [said(tmp_path / "run", 0, rank) for rank in range(2)]
    assert ranks[0]["digests"] == ranks[1]["digests"] and len(ranks[0]["digests"]) == 1 + 8
    given = ranks[0]["continued"]["optimizer"]
    assert given == ranks[1]["continued"]["optimizer"]
    assert given in said(tmp_path / "run", 1)["optimizers"]
