"""First tests of the real core, part 2: cuts, kills, restarts of the syncer, the end of a run.

Fleets in virtual time (`tests/fleet.py`): the ledger's identity and invariant, growing versions and
bounded state are checked there after every event of every test. Times are steps of the fastest.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.fleet import Fleet
from tests.fleet_learner import Spec

pytestmark = pytest.mark.unit


def fleet(specs: list[Spec], **algorithm) -> Fleet:
    settings = {"fragments": 4, "sync_every": 8, "quorum": 1, **algorithm}
    timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0}
    return Fleet(specs, 0, algorithm=settings, timeouts=timeouts)


def finished(played: Fleet) -> dict:
    ledgers = played.run().finish()
    assert played.done is not None and played.done.status == "finished"
    return ledgers


def causes(played: Fleet, learner: str | None = None) -> set[str]:
    return {e["cause"] for e in played.events("lost") if learner in (None, e["learner"])}


def total(ledgers: dict, what: str, learners: Iterable[str] | None = None) -> int:
    return sum(row[what] for name in learners or ledgers for row in ledgers[name])


def checkpoint_at(played: Fleet, time: float) -> None:
    played.at(time, played.core.request_checkpoint)


def test_restore_ten_merges_back_is_an_average_not_a_momentum_step() -> None:
    """[through .7/.9 momentum instead: loss .275 -> 3.19]"""
    played = fleet([Spec(steps=160), Spec(steps=160)], quorum=2)
    checkpoint_at(played, 22.0)
    old = {}

    def kill_after_ten(f: Fleet) -> None:
        saved = f.saved["state"]["versions"][0][1] if f.saved and f.now > 22 else None
        if saved is not None and f.core.run.versions[0][1] >= saved + 10:
            old.update(
                {p: (f.saved["theta"][p].item(), f.saved["buffer"][p].item()) for p in range(4)}
            )
            f.kill_syncer(3.0)
            f.hooks.remove(kill_after_ten)

    played.hooks.append(kill_after_ten)
    heights = []

    def watch(f: Fleet) -> None:
        if f.epoch == 2 and f.syncer_up and not f.core.run.reanchor:
            heights.append(max(abs(theta.item()) for theta in f.theta))

    played.hooks.append(watch)
    finished(played)
    log = [merge for _, merge in played.merge_log if merge.epoch == 2]
    averages, steps = 0.0, 0.0
    for p in range(4):
        of_p = [merge for merge in log if merge.fragment == p]
        assert [merge.reanchor for merge in of_p] == [True] + [False] * (len(of_p) - 1)
        held = of_p[0].contributions
        assert len(held) == 2 and not any(h.message.payload.kind == "delta" for h in held)
        average = sum(h.weight * h.payload[f"w{p:03d}"].item() for h in held)
        average /= sum(h.weight for h in held)
        theta, buffer = old[p]
        buffer = 0.9 * buffer + theta - average
        averages += average**2
        steps += (theta - 0.7 * (theta - average + 0.9 * buffer)) ** 2
    assert averages < 0.5 * steps, (averages, steps)
    # and nothing blows up later: momentum starts from zero
    assert max(heights) <= 2 * averages**0.5


def test_the_syncer_killed_inside_a_round() -> None:
    played = fleet([Spec(steps=100), Spec(steps=100, step_s=1.6)], quorum=2)
    checkpoint_at(played, 35.0)
    state = {}

    def kill_inside(f: Fleet) -> None:
        rounds = [r for r in f.core.run.book.open.values() if r.contributions and r.left]
        if f.now > 45 and rounds:
            state["open"] = rounds[0].number
            f.kill_syncer(4.0)
            f.hooks.clear()

    played.hooks.append(kill_inside)
    ledgers = finished(played)
    opened = [(e["epoch"], e["round"]) for e in played.events("round_open")]
    assert opened == sorted(set(opened))  # no number twice, epochs in order
    checkpointed = played.saved["state"]["epoch"]
    assert checkpointed == 2
    in_two = [e for e in played.events("merge") if e["epoch"] == 2]
    first = {}
    for event in in_two:
        first.setdefault(event["fragment"], event)
    assert all(e["reanchor"] and len(e["contributors"]) == 2 for e in first.values())
    assert len(in_two) > 10 and sum(e["reanchor"] for e in in_two) == 4
    assert total(ledgers, "merged") > 0.6 * total(ledgers, "processed")
    joins = [e for e in played.events("join") if e["continues"]]
    assert [e["learner"] for e in joins] == ["0", "1"]


def test_a_restart_from_nothing_but_a_first_checkpoint() -> None:
    """Version 0 is checkpointed at once, so a syncer killed early has something to resume."""
    played = fleet([Spec(steps=60), Spec(steps=60)])
    played.at(15.0, lambda _: played.kill_syncer(2.0))
    ledgers = finished(played)
    assert played.epoch == 2
    assert total(ledgers, "processed") == 2 * 4 * 600  # nobody had to start again
    assert max(e["epoch"] for e in played.events("merge")) == 2


@pytest.mark.parametrize("seconds", [4.0, 25.0])
def test_one_silent_cut_is_one_rejoin(seconds) -> None:
    """RTT 1. [generations not fenced: 40 000 rejoins after one cut]."""
    played = fleet([Spec(steps=100), Spec(steps=100)])
    played.at(30.2, lambda _: played.cut("1", seconds, silent=True))
    ledgers = finished(played)
    joins = [e for e in played.events("join") if e["learner"] == "1"]
    lease_ran_out = seconds > 10
    assert len(joins) == 1 + lease_ran_out
    assert played.counts["Join"] <= 12
    assert played.counts["Rejoin"] <= 10
    assert total(ledgers, "processed") == 2 * 4 * 1000
    assert causes(played) <= {"overlap", "absent"}  # a cut loses no more than any late learner


def test_a_joiner_cut_off_while_loading() -> None:
    played = fleet([Spec(steps=120), Spec(start=20.0, steps=60, transfer=1.5)])
    played.at(24.0, lambda _: played.cut("1", 6.0))
    finished(played)
    joins = [e for e in played.events("join") if e["learner"] == "1"]
    assert len(joins) == 2 and not any(e["continues"] for e in joins)
    trains = next(e for e in played.events("state") if e["learner"] == "1")
    assert trains["state"] == "training" and trains["t_s"] > 30 + 4 * 1.5
    before = [p for t, p, _, _ in played.current["1"].applied if t < trains["first_step_started_s"]]
    assert set(before) == set(range(4))  # all loaded before any step
    mine = [e for e in played.events("contribution") if e["learner"] == "1"]
    assert mine and all(e["t_s"] > trains["t_s"] and e["base_version"][0] == 1 for e in mine)
    assert [e for e in played.events("merge") if "1" in e["contributors"]]


def test_a_final_while_a_round_is_open() -> None:
    """Learner 0 finishes while rounds wait for learner 1: everything it holds is merged, once."""
    played = fleet([Spec(steps=44), Spec(steps=44, step_s=2.3)], quorum=2)
    open_then = []
    played.hooks.append(
        lambda f: (
            open_then.append(len(f.core.run.book.open))
            if any(m.state == "finishing" for m in f.core.run.members.values())
            else None
        )
    )
    finished(played)
    assert open_then and max(open_then) > 0
    finals = [e for e in played.events("contribution") if e["final"]]
    assert {e["learner"] for e in finals} == {"0", "1"}
    assert {e["verdict"] for e in finals} == {"accepted"}
    assert causes(played) == {"overlap"}


def test_nothing_is_left_behind_at_the_end_of_a_short_run() -> None:
    """[without the final hand-in 11% of a 100-step run's tokens are never merged]"""
    played = fleet([Spec(steps=100, latency=0.0) for _ in range(3)], fragments=8, sync_every=24)
    ledgers = finished(played)
    assert total(ledgers, "lost") < 0.06 * total(ledgers, "processed")
    assert causes(played) <= {"overlap", "absent"}
    assert [e["round"] for e in played.events("round_open")] == list(
        range(1, len(played.events("round_open")) + 1)
    )


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coalesced_versions_under_rebase_lose_nothing(seed) -> None:
    """[by a flag instead of `merged_upto`: tokens wrong in 152 of 200 runs]"""
    specs = [Spec(steps=90), Spec(steps=90, down=4.0 + seed, loss=0.05, repeat=0.1)]
    settings = {"fragments": 4, "sync_every": 8, "quorum": 1, "apply": "rebase"}
    played = Fleet(specs, seed, algorithm=settings)
    ledgers = finished(played)
    versions = [v for _, p, v, _ in played.current["1"].applied if p == 0]
    skipped = [b[1] - a[1] for a, b in itertools.pairwise(versions)]
    assert max(skipped) > 1  # versions were coalesced
    assert total(ledgers, "lost") == 0
    assert total(ledgers, "merged") == total(ledgers, "processed") == 2 * 4 * 900


@pytest.mark.parametrize("apply", ["overwrite", "rebase", "mix"])
def test_a_killed_learner_loses_what_it_had_not_handed_in(apply) -> None:
    played = fleet([Spec(steps=100), Spec(steps=100)], apply=apply)
    played.at(50.3, lambda _: played.kill("1", back_after=2.0, from_step=40))
    ledgers = finished(played)
    dead = [e for e in played.events("lost") if e["cause"] == "dead"]
    assert dead and {e["learner"] for e in dead} == {"1"}
    # at most what one round trip through H steps leaves pending, per fragment
    assert max(e["tokens"] for e in dead) <= 10 * (8 + 4)
    assert total(ledgers, "processed", ["0"]) == 4 * 1000


def test_a_learner_that_returns_after_max_stale_merges_takes_the_current_values() -> None:
    played = fleet([Spec(steps=150), Spec(steps=150)], max_stale=3)
    played.at(30.2, lambda _: played.cut("1", 60.0))
    finished(played)
    rejoin = [e for e in played.events("join") if e["learner"] == "1"][-1]
    assert rejoin["continues"]
    again = [e for e in played.events("apply") if e["learner"] == "1" and e["t_s"] > rejoin["t_s"]]
    first = [e for e in played.events("contribution") if e["learner"] == "1"]
    after = next(e for e in first if e["t_s"] > rejoin["t_s"])
    assert again[0]["t_s"] < after["t_s"]  # Θ first, then work on top of it
    assert "absent" in causes(played, "1")


def test_a_learner_back_in_time_contributes_before_it_takes_anything() -> None:
    played = fleet([Spec(steps=120), Spec(steps=120)], max_stale=20)
    played.at(30.2, lambda _: played.cut("1", 20.0))
    finished(played)
    rejoin = [e for e in played.events("join") if e["learner"] == "1"][-1]
    for p in range(4):
        merged = next(
            e
            for e in played.events("merge")
            if e["t_s"] > rejoin["t_s"] and e["fragment"] == p and "1" in e["contributors"]
        )
        applies = [
            e["t_s"]
            for e in played.events("apply")
            if e["learner"] == "1" and e["fragment"] == p and e["t_s"] > rejoin["t_s"]
        ]
        assert min(applies) > merged["t_s"]
    assert causes(played, "1") <= {"overlap", "absent"}


def test_a_final_that_came_too_late_is_asked_for_again() -> None:
    """Rounds follow each other faster than a hand-in takes: the learner holds back every apply, so
    the base of later final pulls never comes; it hands in what it has, as it stands."""
    specs = [Spec(steps=44, latency=0.6, transfer=0.3), Spec(steps=80, latency=0.0)]
    played = fleet(specs, fragments=6, sync_every=2, apply="mix", grace_rule="none")
    finished(played)
    finals = [e for e in played.events("contribution") if e["final"] and e["learner"] == "0"]
    assert {"late", "accepted"} <= {e["verdict"] for e in finals}
    assert "unsent" not in causes(played)
    left = next(e["t_s"] for e in played.events("leave") if e["learner"] == "0")
    last = next(e["t_s"] for e in played.events("leave") if e["learner"] == "1")
    assert left <= last + 10  # one more question and its answer; not at `timeouts.flush`


@pytest.mark.parametrize("apply", ["overwrite", "rebase"])
def test_unasked_contributions_ahead_of_the_syncer_are_handed_in(apply) -> None:
    """`wait: overlap`, a learner that runs ahead of what the syncer has opened, then finishes."""
    specs = [Spec(steps=22, step_s=1.3, latency=0.0, transfer=1.0)]
    played = fleet(specs, fragments=6, sync_every=2, overlap=2, wait="overlap", apply=apply)
    finished(played)
    assert "unsent" not in causes(played)


def test_a_resumed_run_whose_other_learners_never_return_ends() -> None:
    played = fleet([Spec(steps=60), Spec(steps=200)], quorum=2)
    checkpoint_at(played, 40.0)
    played.at(58.0, lambda _: played.kill("1"))
    played.at(58.1, lambda _: played.kill_syncer(3.0))
    played.run()
    assert played.done is not None and played.epoch == 2


@pytest.mark.parametrize("apply", ["overwrite", "rebase", "mix"])
@pytest.mark.parametrize("seed", range(4))
def test_a_syncer_killed_before_its_first_checkpoint_starts_over_from_the_survivors(
    apply: str, seed: int
) -> None:
    """Merges of the first epoch are undone (`rollback`); what the survivors hold goes on."""
    settings = {"fragments": 4, "sync_every": 8, "quorum": 1, "apply": apply}
    timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0}
    specs = [Spec(steps=100, latency=0.1), Spec(steps=100, start=0.7, latency=0.3)]
    played = Fleet(specs, seed, algorithm=settings, timeouts=timeouts)

    def kill(now: float) -> None:
        played.saves.clear()
        played.kill_syncer(3.0)

    played.at(11.0 + 7.3 * seed, kill)
    ledgers = finished(played)
    assert played.epoch == 2 and "rollback" in causes(played)
    merges = [merge for _, merge in played.merge_log if merge.epoch == 2]
    for p in range(4):  # nobody's work since is thrown away: Θ is their average first
        assert [m.reanchor for m in merges if m.fragment == p][:2] == [True, False]
    assert total(ledgers, "merged") > 0.5 * total(ledgers, "processed")


def test_a_resumed_syncer_to_which_nobody_returns_ends_as_failed() -> None:
    played = fleet([Spec(steps=60)])

    def kill_all(now: float) -> None:
        played.kill("0")
        played.kill_syncer(3.0)

    played.at(20.0, kill_all)
    played.run()
    assert played.done is not None and played.done.status == "failed"
    assert "within timeouts.resume = 120 s" in played.done.reason
    assert played.now == pytest.approx(143.0, abs=2.0)


def test_a_syncer_killed_after_everyone_was_released_ends_as_finished() -> None:
    """Nobody comes back; the checkpoint on which they were released knows that they are done."""
    played = fleet([Spec(steps=60), Spec(steps=60)], quorum=2)

    def kill_once_all_left(f: Fleet) -> None:
        if f.done is None and all(life.ended for life in f.lives) and f.lives:
            f.hooks.remove(kill_once_all_left)
            f.kill_syncer(1.0)

    played.hooks.append(kill_once_all_left)
    ledgers = finished(played)
    assert played.epoch == 2 and "had finished" in played.done.reason
    assert total(ledgers, "pending") == 0 and causes(played) <= {"overlap", "absent"}
