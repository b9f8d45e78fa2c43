"""Random fleets: a plan drawn from any `random.Random` (hypothesis has one that it can shrink)."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.fleet import Fleet
from tests.fleet_learner import Spec

LEARNER_FAULTS = ("kill", "kill_back", "cut", "silent", "pause", "checkpoint")
ALL_FAULTS = (*LEARNER_FAULTS, "syncer", "syncer")


@dataclass
class Fault:
    """One thing that goes wrong, with how long it lasts."""

    time: float
    kind: str
    learner: str
    seconds: float


@dataclass
class Plan:
    """Everything about one fleet; its repr is what a failing test shows."""

    seed: int
    specs: list[Spec]
    algorithm: dict
    faults: list[Fault] = field(default_factory=list)

    def fleet(self) -> Fleet:
        """The fleet, ready to run."""
        timeouts = {"rejoin": 30.0, "heartbeat": 2.0, "lease": 10.0}
        fleet = Fleet(self.specs, self.seed, algorithm=self.algorithm, timeouts=timeouts)
        for fault in self.faults:
            fleet.at(fault.time, lambda _, fault=fault: strike(fleet, fault))
        return fleet


def draw_plan(r: random.Random, faults: tuple[str, ...] = ALL_FAULTS) -> Plan:
    """One to five learners, all settings that change who waits for whom, up to five faults."""
    learners = r.randint(1, 5)
    specs = [draw_spec(r) for _ in range(learners)]
    algorithm = {
        "fragments": r.choice([1, 2, 4, 6]),
        "sync_every": r.choice([2, 4, 8, 12]),
        "quorum": r.randint(1, learners),
        "overlap": r.randint(0, 3),
        "wait": r.choice(["never", "never", "never", "overlap"]),
        "apply": r.choice(["overwrite", "rebase", "mix"]),
        "grace_rule": r.choice(["lateness", "paper", "none"]),
        "on_lost_quorum": r.choice(["degrade", "degrade", "wait"]),
        "max_stale": r.choice([3, 20]),
    }
    plan = Plan(r.randint(0, 2**30), specs, algorithm)
    for _ in range(r.randint(0, 5) if faults else 0):
        who, lasts = str(r.randrange(learners)), r.uniform(1, 30)
        plan.faults.append(Fault(r.uniform(5, 120), r.choice(faults), who, lasts))
    return plan


def draw_spec(r: random.Random) -> Spec:
    """A learner up to twice as slow as another, on a link from none to three steps away."""
    return Spec(
        start=r.choice([0.0, 0.0, r.uniform(0, 20)]),
        step_s=r.uniform(1, 2),
        steps=r.randint(20, 120),
        tokens=r.randint(1, 50),
        latency=r.choice([0.0, 0.1, 0.5, 1.0, 3.0]),
        transfer=r.choice([0.0, 0.0, 0.3, 1.0]),
        jitter=r.choice([0.0, 0.1, 0.3]),
        loss=r.choice([0.0, 0.0, 0.05]),
        repeat=r.choice([0.0, 0.0, 0.1]),
    )


def strike(fleet: Fleet, fault: Fault) -> None:
    """Carry a fault out, if there is still something that it can hit."""
    life = fleet.current.get(fault.learner)
    hit = life is not None and life.alive and not life.ended
    if fault.kind == "checkpoint" and fleet.syncer_up:
        fleet.core.request_checkpoint(fleet.now)
    elif fault.kind == "syncer" and fleet.syncer_up:
        fleet.kill_syncer(min(fault.seconds, 15.0))
    elif fault.kind == "kill" and hit:
        fleet.kill(fault.learner)
    elif fault.kind == "kill_back" and hit:
        step = life.ledger.step if life.ledger else 0
        fleet.kill(fault.learner, min(fault.seconds, 20.0), step)
    elif fault.kind in ("cut", "silent") and hit:
        fleet.cut(fault.learner, fault.seconds, silent=fault.kind == "silent")
    elif fault.kind == "pause" and hit:
        fleet.pause(fault.learner, fault.seconds)
