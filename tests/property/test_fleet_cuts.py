"""Random fleets that are cut at random moments, thrown away, and restored as a whole from the cut.

After every event, before and after the restore, all that `tests/fleet_checks.py` says: nothing is
merged twice (the oracle's intervals go back with the syncer's record), processed = merged + lost +
pending, versions only grow within an epoch. At the end the ledger is exact.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.fleet import Fleet
from tests.fleet_plans import LEARNER_FAULTS, draw_plan

pytestmark = pytest.mark.property
LONGEST_S = 5000.0


def cut_at(fleet: Fleet, time: float, said: Counter[str]) -> None:
    """Ask for a cut, until one is under way."""

    def ask(now: float) -> None:
        if fleet.cuts.done or fleet.done is not None or not fleet.syncer_up:
            return
        try:
            fleet.core.request_cut(now)
            said["asked"] += 1
        except ValueError as error:
            said["refused"] += 1
            assert "no cut can be taken now" in str(error)
        fleet.at(now + 7.0, ask)

    fleet.at(time, ask)


def restore_after(fleet: Fleet, seconds: float, left_out: tuple[str, ...] = ()) -> None:
    """Throw everything away so long after the first cut is done."""

    def watch(fleet: Fleet) -> None:
        if fleet.cuts.done:
            fleet.hooks.remove(watch)
            fleet.at(fleet.now + seconds, lambda _: again())

    def again() -> None:
        if fleet.done is None:
            (cut,) = fleet.cuts.done
            fleet.newest = [tuple(v) for v in fleet.cuts.syncer[cut]["state"]["versions"]]
            fleet.cuts.restore(cut, left_out)

    fleet.hooks.append(watch)


def play(seed: int, wait: str, faults: tuple[str, ...] = (), left_out=()) -> tuple[Fleet, Counter]:
    r, said = random.Random(seed), Counter()
    plan = draw_plan(r, faults)
    plan.algorithm["wait"] = wait
    fleet = plan.fleet()
    fleet.cuts.write_s = r.choice([0.0, 0.5, 3.0])
    cut_at(fleet, r.uniform(3, 60), said)
    restore_after(fleet, r.choice([0.0, r.uniform(0, 40)]), left_out)
    fleet.run(LONGEST_S)
    said["done"], said["failed"] = len(fleet.cuts.done), len(fleet.cuts.failed)
    said["restored"] = fleet.epoch - 1
    for rows in fleet.finish().values():
        for row in rows:
            assert row["processed"] == row["merged"] + row["lost"]
    return fleet, said


@pytest.mark.parametrize("wait", ["never", "overlap"])
@pytest.mark.parametrize("ten", range(2))
def test_a_fleet_goes_on_from_its_cut(wait, ten) -> None:
    total: Counter[str] = Counter()
    for seed in range(10 * ten, 10 * ten + 10):
        fleet, said = play(seed, wait)
        total += said
        if not said["restored"]:
            continue
        start = [i for i, e in enumerate(fleet.tape) if e["event"] == "syncer_start"][-1]
        assert fleet.tape[start]["restored_from"] in fleet.cuts.done
        after = fleet.tape[start:]
        assert not any(event.get("reanchor") for event in after)
        assert "rollback" not in {event.get("cause") for event in after}
        joined = {e["learner"] for e in after if e["event"] == "join" and e["former"]}
        (manifest,) = (done.manifest for done in fleet.cuts.done.values())
        assert joined == set(manifest["learners"])
    assert total["restored"] >= 5, total


@pytest.mark.parametrize("wait", ["never", "overlap"])
def test_learners_fail_around_a_cut(wait) -> None:
    total: Counter[str] = Counter()
    for seed in range(100, 120):
        total += play(seed, wait, LEARNER_FAULTS)[1]
    assert total["restored"] >= 5, total


def test_whoever_does_not_come_back_is_struck_and_closes_as_dead() -> None:
    restored = 0
    for seed in range(200, 215):
        fleet, said = play(seed, "never", left_out=("0",))
        if not said["restored"]:
            continue
        (manifest,) = (done.manifest for done in fleet.cuts.done.values())
        if "0" not in manifest["learners"] or len(manifest["learners"]) < 2:
            continue
        restored += 1
        assert any("did not come back" in text for text in fleet.warnings)
        (account,) = [a for a in fleet.core.run.accounts.values() if a.learner == "0" and a.closed]
        assert account.ended == "dead"
    assert restored >= 3
