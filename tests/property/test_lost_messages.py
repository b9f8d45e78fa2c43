"""No message is sent once and matters: every k-th of a kind is lost, and the run ends exactly.

One run has it all: a learner that is killed and comes back, one cut off, one that leaves, a twin
that is refused, one taken over, a contribution that does not hold, a straggler that is told to
finish, version 0 from the second learner after the first died.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from msgspec.structs import replace as changed

from dd_lightning.protocol import messages as msg
from tests.fleet import Fleet, MessageFault
from tests.fleet_learner import Spec

pytestmark = pytest.mark.property

# transfers of inner state and consistent cuts are no part of this story; they have their own tests
ELSEWHERE = ("Inner", "State", "DonateState", "Cut", "TakeCut")
ALL = {kind.__name__ for kind in (*get_args(msg.TO_SYNCER), *get_args(msg.TO_LEARNER))}
KINDS = sorted(kind for kind in ALL if not kind.startswith(ELSEWHERE))
TIMEOUTS = {"heartbeat": 2.0, "lease": 6.0, "round": 8.0, "reanchor": 8.0, "pull_least": 2.0,
            "finish": 20.0, "rejoin": 20.0, "connect": 20.0}  # fmt: skip


class Eventful(Fleet):
    """What is played is the same for every kind; `spoiled` contributions are refused."""

    def __init__(self) -> None:
        learner = Spec(steps=30, tokens=10, latency=0.4)
        specs = [replace(learner, start=0.1 * i) for i in range(5)] + [replace(learner, steps=300)]
        # 5: no k divides the fragments, so that it is not always the same one that is lost
        algorithm = {"fragments": 5, "sync_every": 4, "quorum": 2, "apply": "rebase"}
        super().__init__(specs, algorithm=algorithm, timeouts=TIMEOUTS)
        self.spoiled = 0
        self.at(0.7, lambda t: self.kill("0", back_after=3.0))  # before it handed in version 0
        self.at(12.0, lambda t: self.kill("1", back_after=4.0, from_step=10))
        self.at(13.0, lambda t: self.cut("2", 9.0, silent=True))
        self.at(20.0, lambda t: self.current["3"].goodbye(t))
        self.at(14.0, lambda t: self.cut("4", 2.0))
        self.at(18.0, lambda t: self.beside("4", takeover=False))
        self.at(25.0, lambda t: self.beside("4", takeover=True))

    def beside(self, name: str, takeover: bool) -> None:
        """A second process under a living one's id."""
        life = next(li for li in self.lives if li.name == name and li.alive)
        life.may_fail = True
        self.start(name, self.now, 10, takeover=takeover, may_fail=True)

    def to_syncer(self, life, message, payload, now) -> None:
        spoils = self.counts["Contribution"] % 7 == 5
        if isinstance(message, msg.Contribution) and spoils and not message.final:
            message = changed(message, fingerprint="of another model")
            self.spoiled += 1
        if isinstance(message, msg.Progress) and self.counts["Progress"] % 9 == 0:
            self.to_syncer(life, msg.Checkpointed(
                generation=message.generation, step=message.step, data_position=0), None, now,
            )  # fmt: skip
        super().to_syncer(life, message, payload, now)


@pytest.mark.parametrize("every", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kth_message_of_a_kind_is_lost(kind, every) -> None:
    fleet = Eventful()
    many = 10**9
    fault = MessageFault(kind, "lose", left=many, every=every, seen=every - 1)  # the first, too
    fleet.message_faults.append(fault)
    fleet.run(until=3000.0)
    ledgers = fleet.finish()
    assert fault.left < many, f"no {kind} was lost"
    assert fleet.done is not None and fleet.done.status == "finished"
    for name, rows in ledgers.items():
        for row in rows:
            assert row["processed"] == row["merged"] + row["lost"], name
    # what was lost is of processes that were killed, displaced or left; nothing for a message
    lost = {(event["learner"], event["cause"]) for event in fleet.events("lost")}
    assert lost <= {("0", "dead"), ("1", "dead"), ("4", "dead"), ("3", "unsent"), ("3", "dead")}
    assert ledgers["2"][0]["merged"] > 0 < ledgers["5"][0]["merged"]


def test_the_story_has_every_kind() -> None:
    fleet = Eventful().run(until=3000.0)
    fleet.finish()
    assert [kind for kind in KINDS if not fleet.counts[kind]] == [] and fleet.spoiled > 2
