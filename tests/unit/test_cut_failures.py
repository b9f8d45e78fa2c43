"""Cuts that meet a failure, in virtual time: refused, gone on without, or failed in words."""

from __future__ import annotations

import pytest

from tests.fleet import Fleet
from tests.fleet_learner import Spec

pytestmark = pytest.mark.unit


def fleet_of(learners: int = 3, **spec) -> Fleet:
    algorithm = {"fragments": 2, "sync_every": 4, "quorum": 1}
    timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0}
    return Fleet([Spec(steps=80, **spec) for _ in range(learners)], algorithm=algorithm,
                 timeouts=timeouts)  # fmt: skip


def test_two_at_once_and_one_at_the_end_are_refused() -> None:
    fleet, said = fleet_of(), []

    def ask(now: float) -> None:
        try:
            said.append(fleet.core.request_cut(now))
        except ValueError as error:
            said.append(str(error))

    def once_somebody_is_done(fleet: Fleet) -> None:
        if fleet.core.run.in_state("finishing"):
            fleet.hooks.remove(once_somebody_is_done)
            ask(fleet.now)

    for time in (0.5, 20.0, 20.1):
        fleet.at(time, ask)
    fleet.hooks.append(once_somebody_is_done)
    fleet.run()
    assert said[1] == "c1" and list(fleet.cuts.done) == ["c1"]
    assert "rounds have not started" in said[0]
    assert "c1 is under way" in said[2]
    assert "the run is ending" in said[3]


def test_a_learner_that_ends_before_it_has_recorded_fails_the_cut_in_words() -> None:
    fleet = fleet_of()
    fleet.at(81.8, lambda t: fleet.core.request_cut(t))
    fleet.run()
    assert "did its last step before it had recorded" in fleet.cuts.failed["c1"].reason


def test_who_is_killed_meanwhile_is_left_out() -> None:
    fleet = fleet_of()
    fleet.cuts.write_s = 3.0
    fleet.at(20.0, lambda t: fleet.core.request_cut(t))
    fleet.at(20.6, lambda t: fleet.kill("1"))
    fleet.run()
    manifest = fleet.cuts.done["c1"].manifest
    assert set(manifest["learners"]) == {"0", "2"} and manifest["without"] == {"1": "is lost"}


def test_a_long_pause_fails_the_cut_in_words_and_holds_nothing_after_it() -> None:
    fleet = fleet_of()
    fleet.at(15.0, lambda t: fleet.pause("1", 45.0))
    fleet.at(22.0, lambda t: fleet.core.request_cut(t))
    fleet.run()
    reason = fleet.cuts.failed["c1"].reason
    assert "learner 1 (paused)" in reason and "timeouts.cut = 20 s" in reason
    assert fleet.done is not None and fleet.core.cuts.under_way is None
    for rows in fleet.finish().values():
        assert all(row["processed"] == row["merged"] + row["lost"] for row in rows)


def test_a_cut_that_its_syncer_does_not_survive_does_not_exist() -> None:
    fleet = fleet_of()
    fleet.cuts.write_s = 5.0
    fleet.at(15.0, lambda t: fleet.core.request_checkpoint(t))
    fleet.at(20.0, lambda t: fleet.core.request_cut(t))
    fleet.at(22.0, lambda _: fleet.kill_syncer(3.0))
    fleet.run()
    assert not fleet.cuts.done and fleet.done is not None
