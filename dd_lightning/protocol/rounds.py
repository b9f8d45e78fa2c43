"""The round machine: when rounds open, who is in them, when they close.

Opening: C·P >= r·H + s, no other round of that fragment open, fewer than `max_in_flight` open.
Closing: quorum reached and the grace window over, or everyone left has contributed; cancelled when
nobody is left and nothing has come. A roster only shrinks. `protocol.md`, "Rounds".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dd_lightning.protocol.actions import HeldContribution
from dd_lightning.protocol.messages import RoundKey


@dataclass(slots=True)
class Asked:
    """A member that has been asked and has not contributed."""

    generation: int
    first_s: float
    sent_s: float


@dataclass(slots=True)
class Round:
    """One scheduled merge of one fragment."""

    epoch: int
    number: int
    fragment: int
    opened_s: float
    wanted: int  # K
    reanchor: bool = False
    last: bool = False  # one of the last rounds: merges what finished learners handed in
    degrade: bool = True  # on_lost_quorum
    roster: tuple[str, ...] = ()  # as opened
    awaiting: set[str] = field(default_factory=set)  # of a restored cut, still to attach
    left: dict[str, Asked] = field(default_factory=dict)  # still to contribute
    contributions: dict[str, HeldContribution] = field(default_factory=dict)  # by learner
    finals: dict[str, HeldContribution] = field(default_factory=dict)  # handed in, no quorum
    quorum_s: float | None = None
    grace_s: float | None = None
    closed_s: float | None = None

    @property
    def key(self) -> RoundKey:
        """(epoch, number)."""
        return (self.epoch, self.number)

    @property
    def received(self) -> int:
        """Contributions, finals included."""
        return len(self.contributions) + len(self.finals)

    @property
    def complete(self) -> bool:
        """Every member left has contributed (and there is something to merge)."""
        return not self.left and not self.awaiting and self.received > 0

    @property
    def empty(self) -> bool:
        """Nobody is left and nothing has come."""
        return not self.left and not self.awaiting and self.received == 0

    @property
    def unreachable(self) -> bool:
        """Under `on_lost_quorum: wait`: too few are left for the quorum."""
        return (
            not self.degrade
            and not self.last
            and len(self.left) + len(self.awaiting) + len(self.contributions) < self.wanted
        )

    @property
    def has_quorum(self) -> bool:
        """Whether the grace window may run: K_r = min(K, members left + contributions received)
        have come. The second is reached exactly when nobody is left, that is, when `complete`."""
        if self.awaiting:
            return False
        if self.reanchor:
            return self.complete
        return self.complete or len(self.contributions) >= self.wanted

    @property
    def deadline(self) -> float | None:
        """When the grace window ends."""
        if self.quorum_s is None or self.grace_s is None:
            return None
        return self.quorum_s + self.grace_s

    def holds(self, learner: str, generation: int) -> bool:
        """Whether a contribution of that generation is in."""
        for held in (self.contributions.get(learner), self.finals.get(learner)):
            if held is not None and held.generation == generation:
                return True
        return False

    def involves(self, learner: str) -> bool:
        """Whether that learner is still asked or has contributed."""
        return learner in self.left or learner in self.contributions or learner in self.finals

    def was_asked(self, learner: str) -> bool:
        """Whether it was ever asked in this round, or has contributed."""
        return learner in self.roster or self.involves(learner)

    def ordered(self) -> tuple[HeldContribution, ...]:
        """Ascending (learner, generation): the order of summation, whatever the arrival."""
        held = [*self.contributions.values(), *self.finals.values()]
        return tuple(sorted(held, key=lambda c: (c.learner, c.generation)))


@dataclass(slots=True)
class RoundBook:
    """Which rounds are open, which number is next, and the offset s of the schedule."""

    fragments: int  # P
    sync_every: int  # H
    next_round: int = 1
    offset: int = 0  # s
    open: dict[int, Round] = field(default_factory=dict)  # by fragment
    merging: dict[RoundKey, Round] = field(default_factory=dict)

    def fragment_of(self, number: int) -> int:
        """p(r) = (r − 1) mod P."""
        return (number - 1) % self.fragments

    def next_number_of(self, fragment: int) -> int:
        """The smallest round number not yet opened that merges `fragment`."""
        behind = (fragment - self.fragment_of(self.next_round)) % self.fragments
        return self.next_round + behind

    def due(self, clock: int) -> bool:
        """Whether the next round's time has come."""
        return clock * self.fragments >= self.next_round * self.sync_every + self.offset

    def skip_lag(self, clock: int) -> None:
        """C more than H past the next opening: the lag goes into s, no burst makes up for it."""
        lag = clock * self.fragments - (self.next_round * self.sync_every + self.offset)
        if lag > self.sync_every * self.fragments:
            self.offset += lag

    def busy(self, fragment: int) -> bool:
        """A round of this fragment is open or being merged."""
        return bool(self.of(fragment))

    @property
    def in_flight(self) -> int:
        """Rounds opened and not yet merged."""
        return len(self.open) + len(self.merging)

    def all(self) -> Iterable[Round]:
        """Open rounds and those being merged."""
        return [*self.open.values(), *self.merging.values()]

    def of(self, fragment: int) -> list[Round]:
        """Its open round and the one being merged, as far as there are any."""
        return [round_ for round_ in self.all() if round_.fragment == fragment]

    def begin(self, round_: Round) -> None:
        """The next round is opened."""
        assert round_.number == self.next_round and not self.busy(round_.fragment)
        self.open[round_.fragment] = round_
        self.next_round += 1

    def reopen(self, round_: Round) -> None:
        """A round that was open in the cut that this run was restored from."""
        assert round_.number < self.next_round and not self.busy(round_.fragment)
        self.open[round_.fragment] = round_

    def close(self, round_: Round, now: float) -> None:
        """It takes no more contributions and is being merged."""
        round_.closed_s = now
        del self.open[round_.fragment]
        self.merging[round_.key] = round_
