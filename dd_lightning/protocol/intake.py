"""Takes contributions in: which round they belong to, which are late, repeated or refused.

`protocol.md`, "Rounds", "Messages are idempotent" and "Refusals".
"""

from __future__ import annotations

from dd_lightning.algorithm import contribution_weight
from dd_lightning.protocol.actions import HeldContribution
from dd_lightning.protocol.closing import Closing
from dd_lightning.protocol.held import NON_FINITE
from dd_lightning.protocol.members import Member
from dd_lightning.protocol.messages import HELD, Closed, Contribution, Pull, Verdict
from dd_lightning.protocol.refusals import RefusedContributions
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.verdicts import needs_values, objection, record_contribution

REJECTED_IN_A_ROW = 3


class Intake:
    """Contributions of current generations. A late or refused one is not merged but stays with its
    learner, which loses it when it next applies that fragment (`absent`)."""

    def __init__(self, run: RunState, closing: Closing) -> None:
        self.run = run
        self.closing = closing
        self.refused = RefusedContributions(run)

    def pull(self, member: Member, round_: Round, values: bool = False) -> Pull:
        """The question put to a member of the roster."""
        fragment = round_.fragment
        held = fragment in member.held_pull
        return Pull(
            generation=member.generation,
            epoch=round_.epoch,
            round=round_.number,
            fragment=fragment,
            base=HELD if held else self.run.versions[fragment],
            merged_upto=member.account.merged_upto[fragment],
            values=values or held,
        )

    def still_good(self, held: HeldContribution) -> bool:
        """What came before its round opened may meanwhile overlap what was merged."""
        message = held.message
        account = self.run.accounts[held.incarnation]
        if account.closed or account.overlaps(message.fragment, message.odometer, message.tokens):
            record_contribution(
                self.run, held.learner, held.generation, message, "late", held.arrived_s, 0.0
            )
            return False
        return True

    def contribute(
        self, member: Member, message: Contribution, payload: object, now: float
    ) -> None:
        """A contribution of a current generation has come."""
        run, book = self.run, self.run.book
        member.account.saw(message.odometer)
        reason = objection(run, member, message)
        if reason is not None:
            self.refuse(member, message, reason, now)
            return
        fragment, algorithm = message.fragment, run.config.algorithm
        held = HeldContribution(
            member.learner,
            member.generation,
            member.join.incarnation,
            message,
            payload,
            member.join.dtype,
            now,
            contribution_weight(
                message.tokens, message.steps, algorithm.sync_every, algorithm.weights
            ),
        )
        round_ = book.open.get(fragment)
        if round_ is not None and round_.number == message.round:
            if round_.involves(member.learner) and member.learner not in round_.left:
                return  # a repeat: once per learner
            self.accept(round_, member, held, now)
        elif message.round >= book.next_round and (message.unasked or message.final):
            if message.final:
                run.final_inbox.setdefault(fragment, {})[member.learner] = held
            else:
                run.early.setdefault(message.round, {})[member.learner] = held
                if round_ is not None:  # it is past that one's step and answers no pull of it
                    self.closing.strike_from(round_, member.learner, now)
        elif member.account.merged_upto[fragment] != (message.epoch, message.round):
            merging = book.merging.get((message.epoch, message.round))
            if merging is None or not merging.holds(member.learner, member.generation):
                self._late(member, message, now)

    def accept(self, round_: Round, member: Member, held: HeldContribution, now: float) -> None:
        """It counts for this round, unless it cannot be anchored: then values are asked for."""
        if needs_values(self.run, held.message):
            self.run.say(member.session, self.pull(member, round_, values=True))
            return
        asked = round_.left.pop(member.learner, None)
        if asked is not None and not held.message.unasked:
            rho = now - asked.first_s - held.message.boundary_wait_s
            member.rho.append(max(0.0, rho))
            while len(member.rho) > 4 * len(self.run.versions):
                member.rho.popleft()
        if round_.quorum_s is not None:
            member.lateness.add(now - round_.quorum_s)
        target = round_.finals if held.message.final else round_.contributions
        target[member.learner] = held
        member.held_pull.discard(round_.fragment)
        member.rejected_in_a_row = 0
        self.closing.check(round_, now)

    def _late(self, member: Member, message: Contribution, now: float) -> None:
        quorum_s = self.closing.quorum_times.get((message.epoch, message.round))
        if quorum_s is not None:
            member.lateness.add(max(0.0, now - quorum_s))
        record_contribution(self.run, member.learner, member.generation, message, "late", now, 0.0)
        closed = (self.run.epoch, message.round)
        self.run.say(
            member.session,
            Closed(generation=member.generation, fragment=message.fragment, round=closed),
        )

    def refuse(self, member: Member, message: Contribution, reason: str, now: float) -> bool:
        """Refused whole: counted, the learner told why, taken off the roster. Whether it was told
        on the tape in full (`RefusedContributions`)."""
        run = self.run
        run.refusals += 1
        has_row = self.refused.has_row(member.learner, reason, now)
        if has_row:
            record_contribution(run, member.learner, member.generation, message, reason, now, 0.0)
        member.rejected_in_a_row = member.rejected_in_a_row + 1 if reason == NON_FINITE else 0
        member.last_error = f"contribution refused: {reason}"
        reload = member.rejected_in_a_row >= REJECTED_IN_A_ROW
        run.say(
            member.session,
            Verdict(
                generation=member.generation,
                epoch=message.epoch,
                round=message.round,
                fragment=message.fragment,
                reason=reason,
                reload=reload,
            ),
        )
        if reload:
            member.rejected_in_a_row = 0
            for fragment in range(len(run.versions)):
                member.outbox.offer(fragment)
        final = member.finals.get(message.fragment)
        if message.final and final is not None:
            final.done = True  # what it cannot hand in is lost as `unsent`
        for round_ in list(run.book.open.values()):  # either of the two may be what is wrong
            if message.fragment == round_.fragment or message.round == round_.number:
                self.closing.strike_from(round_, member.learner, now)
        return has_row
