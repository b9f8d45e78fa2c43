"""One test per feature and inner strategy: trained with a live syncer, compared with plain
Lightning plus a reference DiLoCo, counted step by step and token by token."""

import pytest

from tests.conformance.cells import FEATURES, parameters
from tests.conformance.runs import assert_same, live, plain
from tests.conformance.scenarios import SCENARIOS

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step`"),
]


@pytest.mark.parametrize(("feature", "inner"), parameters(FEATURES))
def test_cell(feature, inner, syncer, tmp_path):
    ours = live(feature, inner, syncer, tmp_path)
    theirs, theta, reference = plain(feature, tmp_path)
    assert reference.steps == feature.steps
    for index in range(feature.learners):
        assert_same(ours.ends[index], theirs[index], f"learner {index}")
    for name, tensor in theta.items():
        assert tensor.equal(ours.theta[name]), f"global {name}"
    seen = ours.ends[0].seen
    assert {name: seen[name] for name in feature.expected} == feature.expected
    assert_counted(feature, ours, reference.merges)
    feature.verify(ours)


@pytest.mark.parametrize(("scenario", "inner"), parameters(SCENARIOS))
def test_scenario(scenario, inner, syncer, tmp_path):
    scenario.run(inner, syncer, tmp_path)


def assert_counted(feature, run, merges):
    """Steps, tokens (processed = merged + lost + pending) and rounds."""
    finishing = [s for s in run.events("state") if s["state"] == "finishing"]
    assert [s["step"] for s in finishing] == [feature.steps] * feature.learners
    ledgers = run.events("ledger")
    assert sorted(ledger["learner"] for ledger in ledgers) == ["0", "1"][: feature.learners]
    for row in (row for ledger in ledgers for row in ledger["fragments"]):
        assert row["processed"] == row["merged"] + row["lost"] + row["pending"]
        assert (row["processed"], row["lost"]) == (feature.tokens, 0)
    rounds = run.events("merge")[:merges]
    assert [merge["round"] for merge in rounds] == list(range(1, merges + 1))
    assert {len(merge["contributors"]) for merge in rounds} <= {feature.learners}
    assert merges == feature.steps * feature.fragments // feature.sync_every
