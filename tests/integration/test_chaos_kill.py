"""A learner is killed in a real run: seen at once, started again, and everything adds up."""

import pytest

from tests.chaos_runs import RUN_TIMEOUT_S, assert_survived, run_with

pytestmark = pytest.mark.integration

SHORT = ["trainer.max_steps=300", "checkpoint.every_s=2", "chaos.min_left_s=5"]
AT_STEP = 80
LEASE_S = 10.0  # timeouts.lease: without a closed connection it would take so long


@pytest.mark.timeout(RUN_TIMEOUT_S + 20)
def test_a_killed_learner_comes_back_and_nothing_is_lost_but_its_own(tmp_path):
    kill = ["chaos=kill_learner", f"chaos.at_step={AT_STEP}"]
    run = run_with(tmp_path / "run", tmp_path / "data", *kill, *SHORT)
    assert_survived(run, "kill_learner")
    assert f"chaos kill_learner: kill of learner 1 at its step {AT_STEP}" in run.printed
    (fault,) = run.of("fault")
    assert (fault["target"], fault["planned"], fault["until"]) == ("1", {"step": AT_STEP}, None)
    (dead,) = run.of("dead")
    assert (dead["learner"], dead["cause"]) == ("1", "connection closed")
    assert 0 <= dead["t_s"] - fault["fired"] < LEASE_S / 2  # by its socket, not by its lease
    joins = run.of("join", learner="1")
    assert [(join["generation"], join["cause"]) for join in joins] == [(1, "join"), (2, "join")]
    assert joins[1]["incarnation"] != joins[0]["incarnation"]
    assert joins[1]["state_from"] in ("checkpoint", "peer")
    # its data goes on where it was last heard of, however old its checkpoint is
    (last,) = [s for s in run.of("learner_stats", learner="1") if s["steps_unreported_max"]]
    assert last["step"] <= joins[1]["data_position"] <= AT_STEP + 1
    assert_rounds_went_on(run, dead["t_s"])
    assert run.summary["uptime"] == 1.0
    assert run.summary["per_learner"]["1"]["joins"] == 2


def assert_rounds_went_on(run, dead_s):
    """Rounds that waited for the dead one have closed, long before `timeouts.round` = 60 s."""
    opened = {(e["epoch"], e["round"]): e for e in run.of("round_open") if e["t_s"] <= dead_s}
    merged = {(e["epoch"], e["round"]): e["t_s"] for e in run.of("merge")}
    cancelled = {(e["epoch"], e["round"]): e["t_s"] for e in run.of("round_cancelled")}
    ended = merged | cancelled
    assert opened.keys() <= ended.keys()
    assert max(ended[key] for key in opened) < dead_s + LEASE_S / 2
    assert any(dead_s < at_s < dead_s + LEASE_S for at_s in merged.values())
