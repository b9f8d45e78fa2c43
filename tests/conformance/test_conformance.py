"""One test per feature and inner strategy: trained with a live syncer, compared with plain
Lightning plus a reference DiLoCo, counted step by step and token by token."""

import pytest

from tests.conformance import group_runs
from tests.conformance.cells import FEATURES, parameters
from tests.conformance.group_runs import GROUPS
from tests.conformance.place import Place, run_in_rank, run_spawned
from tests.conformance.runs import assert_same, live, plain
from tests.conformance.scenarios import SCENARIOS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.mark.parametrize(("feature", "inner"), parameters(FEATURES))
def test_cell(feature, inner, syncer, request, tmp_path):
    if inner in GROUPS:
        ranks = request.getfixturevalue("ranks")
        ours = group_runs.live(feature, inner, ranks, tmp_path)
        theirs, reference = group_runs.plain(feature, inner, ranks, tmp_path)
    else:
        ours = live(feature, inner, syncer, tmp_path)
        theirs, reference = plain(feature, tmp_path)
    assert reference.steps == feature.steps
    for index, end in enumerate(theirs):
        assert_same(ours.ends[index], end, f"end {index}")
    for name, tensor in reference.theta.items():
        assert tensor.equal(ours.theta[name]), f"global {name}"
    seen = ours.ends[0].seen
    assert {name: seen[name] for name in feature.expected} == feature.expected
    assert_counted(feature, ours, reference.merges)
    feature.verify(ours)


@pytest.mark.parametrize(("scenario", "inner"), parameters(SCENARIOS))
def test_scenario(scenario, inner, syncer, request, tmp_path):
    if inner not in GROUPS:
        scenario.run(Place(inner, syncer, tmp_path))
        return
    ranks = request.getfixturevalue("ranks")
    if scenario.run_group is not None:
        scenario.run_group(inner, ranks, tmp_path)
    elif inner == "ddp_spawn":
        run_spawned(scenario, ranks, tmp_path)
    else:
        ranks.run(run_in_rank, scenario.name, inner, str(tmp_path))


def assert_counted(feature, run, merges):
    """Steps, tokens (processed = merged + lost + pending) and rounds."""
    finishing = [s for s in run.events("state") if s["state"] == "finishing"]
    assert [s["step"] for s in finishing] == [feature.steps] * feature.learners
    ledgers = run.events("ledger")
    assert sorted(ledger["learner"] for ledger in ledgers) == ["0", "1"][: feature.learners]
    for row in (row for ledger in ledgers for row in ledger["fragments"]):
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
        assert (row["processed"], row["lost"]) == (feature.tokens * run.ranks, 0)
    rounds = run.events("merge")[:merges]
    assert [merge["round"] for merge in rounds] == list(range(1, merges + 1))
    assert {len(merge["contributors"]) for merge in rounds} <= {feature.learners}
    assert merges == feature.steps * feature.fragments // feature.sync_every
