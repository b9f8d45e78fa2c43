"""Who donates inner state to whom: the syncer's part of a transfer. It relays, and keeps none.

A learner that starts at the run's clock without a state of its own (its process was killed and left
no checkpoint, or it is new) gets a peer's. Of those in training with the same inner optimizer the
one donates that has done so least often, then least recently; nobody donates to two at once. The
receiver's acknowledgements pace the donor, so at most WINDOW chunks of a transfer are in memory
here. Lost when donor, receiver or a link dies: that transfer; the next donor begins anew.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from msgspec.structs import replace

from dd_lightning.protocol.actions import RelayState
from dd_lightning.protocol.members import JOINING, PAUSED, TRAINING, Member
from dd_lightning.protocol.messages import (
    DonateState,
    Inner,
    StateChunk,
    StateComing,
    StateFailed,
    StateLoaded,
    StateOver,
    StateReceived,
)
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.transfer import MOST_DONORS, WINDOW

NOBODY = "no learner in training has the same inner optimizer"


@dataclass(slots=True)
class Transfer:
    """One donor, one receiver."""

    number: int
    donor: str
    donor_generation: int
    relayed: int = 0  # chunks
    acknowledged: int = 0


@dataclass(slots=True)
class Receiver:
    """A joining learner that waits for a state."""

    generation: int
    since_s: float  # of the last progress
    optimizer: str | None = None  # None: not described yet
    tried: int = 0
    transfer: Transfer | None = None


class Donations:
    """Every transfer of a run; bounded by the learners in it."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.receivers: dict[str, Receiver] = {}
        self._given: dict[str, tuple[int, int]] = {}  # learner: how often, its last transfer
        self._numbers = itertools.count(1)

    # ------------------------------------------------------------------ messages

    def described(self, member: Member, message: Inner, now: float) -> None:
        """What inner optimizer a learner has; of one that waits it is the wish itself."""
        member.optimizer = message.optimizer
        if not member.donated or member.state != JOINING:
            return
        waiting = self.receivers.get(member.learner)
        if waiting is None or waiting.generation != member.generation:
            if member.join_row is None:  # decided: it has not heard
                self._say_over(member, "decided before")
                return
            waiting = self.receivers[member.learner] = Receiver(member.generation, now)
        waiting.optimizer = message.optimizer
        self.run.say(member.session, StateComing(generation=member.generation))

    def chunk(self, donor: Member, message: StateChunk, payload: object, now: float) -> None:
        """Relay it; what nobody waits for is dropped, and the donor told."""
        found = self._of(message.transfer)
        if found is None or found[1].donor != donor.learner:
            reason = "nobody waits for it"
            self.run.say(
                donor.session,
                StateOver(generation=donor.generation, transfer=message.transfer, reason=reason),
            )
            return
        learner, transfer = found
        beyond = message.chunk >= transfer.acknowledged + WINDOW
        if message.chunk != transfer.relayed or beyond:
            return
        transfer.relayed += 1
        self.receivers[learner].since_s = now
        receiver = self.run.members[learner]
        relayed = replace(message, generation=receiver.generation)
        self.run.actions.append(RelayState(receiver.session, relayed, payload))

    def received(self, member: Member, message: StateReceived, now: float) -> None:
        """An acknowledgement: the donor may send more."""
        waiting, transfer = self._own(member, message.transfer)
        if waiting is None or transfer is None:
            return
        if transfer.acknowledged < message.chunks <= transfer.relayed:
            transfer.acknowledged = message.chunks
            waiting.since_s = now
            self._ask(transfer)

    def loaded(self, member: Member, message: StateLoaded, now: float) -> None:
        """The receiver has what it needs."""
        waiting, transfer = self._own(member, message.transfer)
        if waiting is not None and transfer is not None:
            self._record(member.learner, transfer, "loaded")
            self._decide(member, "peer", message.step)

    def failed(self, member: Member, message: StateFailed, now: float) -> None:
        """Of a donor or a receiver: another donor, unless the receiver waits no longer."""
        waiting, transfer = self._own(member, message.transfer)
        if waiting is not None and message.transfer == 0:
            self._give_up(member, message.reason)
        elif waiting is not None and transfer is not None:
            self._another(member.learner, waiting, message.reason, now)
        elif (found := self._of(message.transfer)) and found[1].donor == member.learner:
            self._another(found[0], self.receivers[found[0]], message.reason, now)

    # ------------------------------------------------------------------ time

    def settle(self, now: float) -> None:
        """After every event: begin what may begin, end what cannot go on."""
        timeout_s = self.run.config.timeouts.donor
        for learner, waiting in list(self.receivers.items()):
            member = self.run.members[learner]
            if member.generation != waiting.generation or member.state != JOINING:
                self._forget(learner, waiting, "the receiver is gone")
                continue
            transfer = waiting.transfer
            if transfer is not None:
                if not self._donates(transfer):
                    self._another(learner, waiting, "the donor is gone", now)
                elif now >= waiting.since_s + timeout_s:
                    self._another(learner, waiting, f"no progress for {timeout_s:g} s", now)
            if waiting.transfer is None and learner in self.receivers:
                self._begin(member, waiting, now)

    def deadlines(self) -> list[float]:
        """When `settle` is needed next."""
        timeout_s = self.run.config.timeouts.donor
        return [w.since_s + timeout_s for w in self.receivers.values() if w.optimizer is not None]

    def close(self) -> None:
        """The run is over."""
        for learner, waiting in list(self.receivers.items()):
            self._forget(learner, waiting, "the run is over")

    # ------------------------------------------------------------------ pieces

    def _begin(self, member: Member, waiting: Receiver, now: float) -> None:
        if waiting.optimizer is None:
            return
        if waiting.tried >= MOST_DONORS:
            self._give_up(member, f"{waiting.tried} donors failed")
            return
        others = [m for m in self.run.live if m.learner != member.learner]
        able = [m for m in others if m.optimizer == waiting.optimizer != "" and m.state == TRAINING]
        busy = {w.transfer.donor for w in self.receivers.values() if w.transfer is not None}
        free = [m for m in able if m.learner not in busy]
        if free:
            chosen = min(free, key=lambda m: (*self._given.get(m.learner, (0, 0)), m.learner))
            number = next(self._numbers)
            count = self._given.get(chosen.learner, (0, 0))[0]
            self._given[chosen.learner] = (count + 1, number)
            waiting.transfer = Transfer(number, chosen.learner, chosen.generation)
            waiting.since_s = now
            self._ask(waiting.transfer)
        elif able:
            return  # each is donating; a transfer without progress ends
        elif now >= waiting.since_s + self.run.config.timeouts.donor or not self._may_come(
            others, waiting
        ):
            self._give_up(member, NOBODY)

    @staticmethod
    def _may_come(others: list[Member], waiting: Receiver) -> bool:
        """Whether somebody may be able to donate soon."""
        return waiting.optimizer != "" and any(
            m.optimizer in ("", waiting.optimizer)
            and (m.state == PAUSED or (m.state == JOINING and m.join_row is None))
            for m in others
        )

    def _ask(self, transfer: Transfer) -> None:
        donor = self.run.members[transfer.donor]
        upto = transfer.acknowledged + WINDOW
        message = DonateState(generation=donor.generation, transfer=transfer.number, upto=upto)
        self.run.say(donor.session, message)

    def _donates(self, transfer: Transfer) -> bool:
        donor = self.run.members[transfer.donor]
        same = donor.generation == transfer.donor_generation
        return same and donor.state in (TRAINING, PAUSED)

    def _own(self, member: Member, number: int) -> tuple[Receiver | None, Transfer | None]:
        waiting = self.receivers.get(member.learner)
        if waiting is None or waiting.generation != member.generation:
            return None, None
        transfer = waiting.transfer
        return waiting, transfer if transfer is not None and transfer.number == number else None

    def _of(self, number: int) -> tuple[str, Transfer] | None:
        for learner, waiting in self.receivers.items():
            if waiting.transfer is not None and waiting.transfer.number == number:
                return learner, waiting.transfer
        return None

    def _another(self, learner: str, waiting: Receiver, reason: str, now: float) -> None:
        self._end(learner, waiting, reason)
        waiting.tried += 1
        waiting.since_s = now

    def _end(self, learner: str, waiting: Receiver, reason: str) -> None:
        transfer, waiting.transfer = waiting.transfer, None
        if transfer is None:
            return
        self._record(learner, transfer, reason)
        if self._donates(transfer):
            donor = self.run.members[transfer.donor]
            over = StateOver(generation=donor.generation, transfer=transfer.number, reason=reason)
            self.run.say(donor.session, over)

    def _forget(self, learner: str, waiting: Receiver, reason: str) -> None:
        self._end(learner, waiting, reason)
        del self.receivers[learner]
        self.run.record_join(self.run.members[learner], waiting.generation)

    def _give_up(self, member: Member, reason: str) -> None:
        self._end(member.learner, self.receivers[member.learner], reason)
        self._decide(member, "cold", 0)
        self.run.record(
            "donation", learner=member.learner, donor="", transfer=0, outcome=f"cold: {reason}"
        )
        self._say_over(member, reason)

    def _say_over(self, member: Member, reason: str) -> None:
        over = StateOver(generation=member.generation, transfer=0, reason=reason)
        self.run.say(member.session, over)

    def _decide(self, member: Member, state_from: str, step: int) -> None:
        del self.receivers[member.learner]
        self.run.record_join(member, member.generation, state_from=state_from, state_step=step)

    def _record(self, learner: str, transfer: Transfer, outcome: str) -> None:
        self.run.record(
            "donation",
            learner=learner,
            donor=transfer.donor,
            transfer=transfer.number,
            outcome=outcome,
            chunks=transfer.relayed,
        )
