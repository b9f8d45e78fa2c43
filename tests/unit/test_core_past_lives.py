"""A learner that dies a hundred times: exact totals, and nothing kept for each of its lives."""

from __future__ import annotations

import pytest

from dd_lightning.protocol import messages as msg
from dd_lightning.protocol.accounts import Account, PastLives
from dd_lightning.protocol.syncer_core import SyncerCore
from tests.scripted_core import TOKENS, ScriptedCore

pytestmark = pytest.mark.unit


def live_and_die(core: ScriptedCore, life: int, contributes: bool = False) -> None:
    """Process `life` of learner 0: joins, makes a step (and contributes it), is killed."""
    core.steps["0"] = 0
    core.join("0", session=f"s{life}", incarnation=f"life{life}")
    core.step("0")
    for round_ in list(core.core.run.book.open.values()) if contributes else ():
        core.receive(f"s{life}", core.contribution("0", round_.number), payload="x")
    core.core.disconnected(f"s{life}", core.now)
    core.carry_out()


def sums(core: SyncerCore, learner: str) -> list[tuple[int, int, int, int]]:
    rows = core.run.ledger(learner)
    return [(r["processed"], r["merged"], r["lost"], r["pending"]) for r in rows]


def restarted(lives: int) -> ScriptedCore:
    core = ScriptedCore(learners=2, quorum=1, grace_rule="none").started("0", "1")
    core.core.disconnected("0", core.now)
    for life in range(lives):
        core.step("1")
        live_and_die(core, life, contributes=life % 3 == 0)
        core.advance(0.1)
    return core


def test_only_the_last_life_has_an_account_of_its_own() -> None:
    core = restarted(100)
    run = core.core.run
    assert set(run.accounts) == {"1-a", "life99"}
    assert run.past["0"].lives == 100 and set(run.past) == {"0"}
    assert run.generations == {"0": 101, "1": 1} and set(run.slots) == {"0", "1"}
    seen = [row for row in core.events("contribution") if row["verdict"] == "accepted"]
    for p, (processed, merged, lost, pending) in enumerate(sums(core.core, "0")):
        assert processed == 101 * TOKENS == merged + lost + pending
        mine = [r["tokens"] for r in seen if r["learner"] == "0" and r["fragment"] == p]
        assert merged == sum(mine) > 0
        booked = sum(e["tokens"] for e in core.events("lost") if e["fragment"] == p)
        assert booked == lost
    both = [*sums(core.core, "0"), *sums(core.core, "1")]  # of two fragments of two elements
    assert run.tokens_merged * 2 == sum(merged for _, merged, _, _ in both)


def test_what_a_round_still_holds_of_a_past_life_is_merged_before_its_books_close() -> None:
    core = ScriptedCore(learners=2, quorum=2).started("0", "1").opened(1)
    core.receive("0", core.contribution("0", 1), payload="x")
    core.core.disconnected("0", core.now)
    live_and_die(core, 0)
    assert "0-a" in core.core.run.accounts  # its contribution may yet be merged
    core.receive("1", core.contribution("1", 1), payload="y")
    assert [held.learner for held in core.merges[0].contributions] == ["0", "1"]
    assert "0-a" not in core.core.run.accounts and core.core.run.past["0"].merged[0] > 0


def test_a_checkpoint_carries_the_past() -> None:
    core = restarted(5)
    state = core.core.state()
    again = SyncerCore(core.config, run_id="r", epoch=2, restored=state)
    assert sums(again, "0") == sums(core.core, "0")
    assert again.run.tokens_merged == core.core.run.tokens_merged
    assert again.state()["past"] == state["past"] and len(state["accounts"]) == 2


def test_a_checkpoint_from_before_there_was_a_past_loads() -> None:
    core = restarted(5)
    state = core.core.state()
    del state["past"]
    old = Account("0", "older", 2, generation=1, odometer=70, ended="dead", closed=True,
                  marks=[70, 70], merged=[30, 0], lost=[40, 70])  # fmt: skip
    state["accounts"].append(old.state())
    again = SyncerCore(core.config, run_id="r", epoch=2, restored=state)
    before = sums(again, "0")
    join = msg.Join(learner="1", incarnation="1-b", number=1, tensors=core.core.run.layout.tensors)
    again.receive("s", join, 1.0)
    assert "older" not in again.run.accounts and again.run.past["0"] == PastLives(
        [30, 0], [40, 70], 1, 70
    )
    assert sums(again, "0") == before


@pytest.mark.parametrize("generation", [1, 50])
def test_a_past_life_does_not_come_back(generation) -> None:
    core = restarted(60)
    core.join("0", session="ghost", incarnation="life3", number=9, generation=generation)
    (refused,) = core.sent("ghost", msg.Refused)
    assert refused.fatal and "another process" in refused.reason
    assert core.core.run.generations["0"] == 61


def test_the_last_life_comes_back_though_the_syncer_restarted() -> None:
    core = restarted(3)
    again = SyncerCore(core.config, run_id="r", epoch=2, restored=core.core.state())
    tensors = core.core.run.layout.tensors
    join = msg.Join(
        learner="0", incarnation="life2", number=2, generation=4, continues=True, tensors=tensors,
        versions=((1, 0), (1, 0)), odometer=TOKENS, pending=((1, TOKENS), (1, TOKENS)),
    )  # fmt: skip
    again.receive("s", join, 1.0)
    assert again.run.members["0"].generation == 5
