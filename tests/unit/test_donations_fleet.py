"""Inner state from a peer, in virtual time: donors, deaths, cuts, and what the syncer keeps."""

from __future__ import annotations

import pytest

from tests.fleet_donors import DonatingFleet
from tests.fleet_learner import Spec

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """A hundred chunks of a state, each 0.05 steps on its way."""
    monkeypatch.setattr("dd_lightning.protocol.transfer.CHUNK_BYTES", 64)


def fleet(count: int = 3, optimizers=None, **spec) -> DonatingFleet:
    spec = {"steps": 150, "transfer": 0.05} | spec
    settings = {"fragments": 4, "sync_every": 8, "quorum": 1, "max_learners": 8}
    timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0, "donor": 6.0}
    specs = [Spec(**spec) for _ in range(count)]
    return DonatingFleet(specs, 0, algorithm=settings, timeouts=timeouts, optimizers=optimizers)


def played(made: DonatingFleet) -> DonatingFleet:
    """To the end; nothing of any transfer is left on the syncer, and each join is on the tape."""
    made.run().finish()
    assert not made.core.donations.receivers
    joins = {(j["learner"], j["generation"]) for j in made.events("join")}
    assert len(joins) == len(made.events("join"))
    for dead in made.events("dead") + made.events("leave"):
        assert (dead["learner"], dead["generation"]) in joins
    return made


def joins(made: DonatingFleet, learner: str) -> list[str]:
    return [j["state_from"] for j in made.events("join") if j["learner"] == learner]


def at(made: DonatingFleet, time: float, what) -> None:
    made.at(time, lambda t: what())


def during_transfer(made: DonatingFleet, what, after: int = 20) -> None:
    """Once, when so many chunks of a transfer have been relayed."""

    def hook(f) -> None:
        for learner, waiting in f.core.donations.receivers.items():
            if waiting.transfer is not None and waiting.transfer.relayed >= after:
                f.hooks.remove(hook)
                what(learner, waiting.transfer.donor)
                return

    made.hooks.append(hook)


def test_a_killed_learner_without_a_checkpoint_gets_the_state_of_a_peer() -> None:
    made = fleet()
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    played(made)
    assert joins(made, "2") == ["cold", "peer"]
    donor, step = made.origin("2")
    assert donor in ("0", "1") and 40 <= step <= 50
    (donation,) = made.events("donation")
    assert (donation["donor"], donation["outcome"]) == (donor, "loaded")
    (_, join) = [j for j in made.events("join") if j["learner"] == "2"]
    assert join["state_step"] == step and join["t_s"] < 44  # of the arrival, written later


def test_one_with_a_checkpoint_asks_nobody() -> None:
    made = fleet()
    at(made, 40.0, lambda: made.kill("2", back_after=2.0, from_step=30))
    played(made)
    assert joins(made, "2") == ["cold", "checkpoint"] and made.chunks == 0


def test_donors_are_spread() -> None:
    made = fleet(4)
    for k in range(6):
        at(made, 20.0 + 15 * k, lambda: made.kill("3", back_after=1.0))
    played(made)
    donors = [d["donor"] for d in made.events("donation")]
    assert donors == ["0", "1", "2"] * 2


def test_two_receivers_have_two_donors_at_once() -> None:
    made = fleet(4)
    for name in ("2", "3"):
        at(made, 30.0, lambda name=name: made.kill(name, back_after=1.0))
    most = []
    made.hooks.append(
        lambda f: most.append(
            sorted(w.transfer.donor for w in f.core.donations.receivers.values() if w.transfer)
        )
    )
    played(made)
    assert ["0", "1"] in most and max(map(len, most)) == 2
    assert joins(made, "2")[-1] == joins(made, "3")[-1] == "peer"


def test_one_donor_serves_two_receivers_one_after_the_other() -> None:
    made = fleet(3)
    for name in ("1", "2"):
        at(made, 30.0, lambda name=name: made.kill(name, back_after=1.0))
    played(made)
    assert [d["outcome"] for d in made.events("donation")] == ["loaded", "loaded"]
    assert {d["donor"] for d in made.events("donation")} == {"0"} or made.origin("2")[0] == "1"


def test_the_donor_dies_and_the_next_begins_anew() -> None:
    made = fleet()
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    died = []

    def kill(_, donor):
        died.append(donor)
        made.kill(donor, back_after=60.0)

    during_transfer(made, kill)
    played(made)
    outcomes = [(d["donor"], d["outcome"]) for d in made.events("donation")]
    assert outcomes[0] == (died[0], "the donor is gone")
    assert outcomes[1][1] == "loaded" and outcomes[1][0] != died[0]
    assert made.origin("2")[0] == outcomes[1][0]


def test_the_receiver_dies_and_its_next_life_asks_anew() -> None:
    made = fleet()
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    during_transfer(made, lambda receiver, _: made.kill(receiver, back_after=3.0))
    played(made)
    assert joins(made, "2") == ["cold", "cold", "peer"]
    assert [d["outcome"] for d in made.events("donation")] == ["the receiver is gone", "loaded"]


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("whose", [0, 1])
def test_a_cut_link_in_the_middle(whose, silent) -> None:
    made = fleet()
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    during_transfer(made, lambda *both: made.cut(both[whose], 12.0 if silent else 3.0, silent))
    played(made)
    outcomes = [d["outcome"] for d in made.events("donation")]
    assert outcomes[-1] == "loaded" and len(outcomes) == (3 if silent and whose == 0 else 2)
    assert joins(made, "2")[-1] == "peer" and made.origin("2") is not None
    if silent and whose == 1:
        assert outcomes[0] == "no progress for 6 s"


def test_a_restart_of_the_syncer_in_the_middle() -> None:
    made = fleet()
    at(made, 35.0, lambda: made.core.request_checkpoint(35.0))
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    during_transfer(made, lambda *_: made.kill_syncer(3.0))
    made.run().finish()
    assert not made.core.donations.receivers and joins(made, "2")[-1] == "peer"


def test_nobody_with_the_same_optimizer_means_cold_at_once() -> None:
    made = fleet(optimizers={"2": "adam"})
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    with pytest.warns(UserWarning, match="empty inner optimizer: no learner in training"):
        played(made)
    assert joins(made, "2") == ["cold", "cold"] and made.chunks == 0
    assert made.current["2"].began_s < 46


def test_alone_means_cold_at_once() -> None:
    made = fleet(1)
    at(made, 40.0, lambda: made.kill("0", back_after=2.0))
    with pytest.warns(UserWarning, match="empty inner optimizer"):
        played(made)
    assert made.current["0"].began_s < 46


def test_after_a_few_donors_it_is_cold() -> None:
    made = fleet(5)
    at(made, 40.0, lambda: made.kill("4", back_after=2.0))

    def drop(f) -> None:  # every donor's link loses the chunks
        for life in f.current.values():
            life.link.inner.drop()

    made.hooks.append(drop)
    with pytest.warns(UserWarning, match="3 donors failed"):
        played(made)
    outcomes = [d["outcome"] for d in made.events("donation")]
    assert outcomes == ["no progress for 6 s"] * 3 + ["cold: 3 donors failed"]
    assert joins(made, "4") == ["cold", "cold"]


def test_lost_and_repeated_messages_cost_time_only() -> None:
    made = fleet(loss=0.1, repeat=0.1)
    at(made, 40.0, lambda: made.kill("2", back_after=2.0))
    played(made)
    assert made.origin("2") is not None or joins(made, "2")[-1] == "cold"


def test_a_newcomer_nobody_planned_gets_one_and_a_planned_one_begins_at_0() -> None:
    late = Spec(start=30.0, steps=60, transfer=0.05)
    algorithm = {"fragments": 4, "sync_every": 8, "max_learners": 8}
    made = DonatingFleet(
        [Spec(steps=100, transfer=0.05), late, late], 0, learners=2, algorithm=algorithm
    )
    played(made)
    assert (joins(made, "1"), joins(made, "2")) == (["cold"], ["peer"])
