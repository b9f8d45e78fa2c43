"""Who takes part: learners, their generations and states, and the run clock.

States: joining → training (from the first finished step) ⇄ paused → finishing → gone; or lost.
Rosters, run clock and quorum look at `training` only: live is not training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from dd_lightning.protocol.accounts import Account
from dd_lightning.protocol.estimates import KEPT_STEPS, Lateness, StepTime
from dd_lightning.protocol.messages import Join, Pull, Version
from dd_lightning.protocol.outbox import Outbox

JOINING, TRAINING, PAUSED, FINISHING = "joining", "training", "paused", "finishing"
GONE, LOST = "gone", "lost"
LIVE = frozenset({JOINING, TRAINING, PAUSED, FINISHING})

CLOCK_SLACK = 8  # a schedule clock is raised to C − 8 when further behind
NOTHING_HELD: Version = (-1, -1)


@dataclass(slots=True)
class Final:
    """How far the hand-in of one fragment of a finishing learner is."""

    pull: Pull | None = None  # the question that stands
    asked_s: float = 0.0
    done: bool = False  # answered `nothing`


@dataclass(slots=True)
class Member:
    """One learner in its current generation."""

    learner: str
    generation: int
    session: str
    join: Join
    account: Account
    data_slot: int
    joined_s: float
    state: str = JOINING
    peer_address: str = ""
    step: int = 0
    reported_s: float = 0.0
    stepped_s: float = 0.0
    first_step_s: float | None = None  # when its first step of this incarnation began
    waiting: bool = False  # inside a boundary under `wait: overlap`
    seconds_stepping: float = 0.0
    coalesced_most: int = 0  # steps in one report
    losses: tuple[float, ...] = ()
    last_error: str = ""
    rtt_ms: float | None = None
    resumes: bool = False  # as part of a run restored from a cut: counts as training from the join
    reload: bool = False  # it lived on beside such a restore: is told to take Θ as it is
    clock_base: int | None = None  # schedule clock = clock_base + step; None before a first step
    versions: list[Version] = field(default_factory=list)  # applied, as far as we know
    on_tape: dict[int, Version] = field(default_factory=dict)  # by fragment: its newest apply
    held_pull: set[int] = field(default_factory=set)  # whose next pull carries base "held"
    first_round: int = 0  # the first that may have this generation in its roster
    withheld: set[int] = field(default_factory=set)  # not sent before a round of it has closed
    outbox: Outbox = field(default_factory=Outbox)
    steps: StepTime = field(default_factory=StepTime)
    boundaries: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))  # seconds
    lateness: Lateness = field(default_factory=Lateness)
    rho: deque[float] = field(default_factory=deque)
    took_part: deque[bool] = field(default_factory=deque)
    finals: dict[int, Final] = field(default_factory=dict)
    all_done_s: float | None = None
    finishing_s: float | None = None
    rejected_in_a_row: int = 0
    named: bool = False  # as one that contributes to fewer than half of the rounds
    released: bool = False
    told_to_finish: str = ""  # and why
    stats_s: float = 0.0
    optimizer: str = ""  # digest of its inner optimizer's description, "": not told
    donated: bool = False  # was told to wait for a peer's inner state
    data_position: int = 0  # where its slot's data goes on, told at its join
    join_row: dict[str, Any] | None = None  # for the tape, once it is known where its state is from

    @property
    def live(self) -> bool:
        """Not gone and not lost."""
        return self.state in LIVE

    @property
    def clock(self) -> int | None:
        """The schedule clock, in inner steps; None before the first finished step."""
        return None if self.clock_base is None else self.clock_base + self.step

    @property
    def rho_s(self) -> float | None:
        """Lowest recent time from a pull to its contribution, without the boundary's wait."""
        return min(self.rho, default=None)

    @property
    def transfer_s(self) -> float:
        """Time one fragment occupies the uplink: what ρ has beyond the round trip."""
        if self.rho_s is None:
            return 0.0
        return max(0.0, self.rho_s - (self.rtt_ms or 0.0) / 1000.0)


@dataclass(slots=True)
class RunClock:
    """C: the min(K, training)-th largest schedule clock of the training learners; never falls."""

    quorum: int
    value: int = 0

    def update(self, training: Iterable[Member]) -> int:
        """Raise those further behind than C − 8, then C. With nobody training it stands still."""
        members = [member for member in training if member.clock_base is not None]
        clocks = sorted((member.clock or 0 for member in members), reverse=True)
        if clocks:
            self.value = max(self.value, clocks[min(self.quorum, len(clocks)) - 1])
        for member in members:
            behind = self.value - CLOCK_SLACK - (member.clock or 0)
            if behind > 0:
                member.clock_base = (member.clock_base or 0) + behind
        return self.value


def median_step(members: Iterable[Member]) -> float | None:
    """Median over the learners of ξ_step."""
    values = [member.steps.value for member in members if member.steps.value is not None]
    return median(values) if values else None


def median_rho(members: Iterable[Member]) -> float | None:
    """Median over the learners of ρ."""
    values = [member.rho_s for member in members if member.rho_s is not None]
    return median(values) if values else None
