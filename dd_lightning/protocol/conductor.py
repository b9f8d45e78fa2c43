"""Conducts the rounds: opens them, takes contributions, closes and books merges.

Drives `RoundBook` from the run clock and the members; `protocol.md`, "Rounds", "Grace window",
"Messages are idempotent" and the epoch rules are carried out here.
"""

from __future__ import annotations

from dd_lightning.algorithm import contribution_weight
from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.bookings import Bookings
from dd_lightning.protocol.members import Member, median_step
from dd_lightning.protocol.messages import HELD, Closed, Contribution, Pull, Verdict
from dd_lightning.protocol.openings import Openings
from dd_lightning.protocol.rounds import Asked, Round
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.verdicts import (
    needs_values,
    objection,
    record_contribution,
    record_merge,
)

NON_FINITE = "non-finite"
REJECTED_IN_A_ROW = 3


class Conductor:
    """Rounds of one epoch. Losing any message costs time only; late work is not merged but stays
    with its learner, which loses it when it next applies that fragment (`absent`)."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.outstanding = 0  # merges handed out and not yet reported
        self.held_merges: list[Merge] = []  # closed while a checkpoint waits
        self.hold = False
        self.quorum_times: dict[tuple[int, int], float | None] = {}  # of recent rounds
        self.openings = Openings(run)
        self.bookings = Bookings(run)

    # ------------------------------------------------------------------ opening

    def open_due(self, now: float) -> None:
        """Open every round that may open now, in order."""
        while self.openings.next_is_due(now):
            self.open(now, self.run.training)

    def open(self, now: float, training: list[Member], last: bool = False) -> Round:
        """Open the next round with these members asked."""
        run, book = self.run, self.run.book
        number = book.next_round
        fragment = book.fragment_of(number)
        round_ = Round(
            run.epoch,
            number,
            fragment,
            now,
            run.config.quorum,
            reanchor=fragment in run.reanchor,
            last=last,
            degrade=run.config.algorithm.on_lost_quorum == "degrade",
            roster=tuple(member.learner for member in training),
        )
        book.begin(round_)
        run.record(
            "round_open",
            epoch=run.epoch,
            round=number,
            fragment=fragment,
            roster=list(round_.roster),
            quorum=round_.quorum if last else min(run.config.quorum, max(1, len(training))),
        )
        for member in training:
            round_.left[member.learner] = Asked(member.generation, now, now)
            run.say(member.session, self._pull(member, round_))
        for held in run.final_inbox.pop(fragment, {}).values():
            if self._still_good(held):
                round_.finals[held.learner] = held
        for learner, held in run.early.pop(number, {}).items():
            member = run.members.get(learner)
            if member is None or not member.live or member.generation != held.generation:
                continue
            if learner not in round_.finals and self._still_good(held):
                self._accept(round_, member, held, now)
        return round_

    def _still_good(self, held: HeldContribution) -> bool:
        """What came before its round opened may meanwhile overlap what was merged."""
        message = held.message
        account = self.run.accounts[held.incarnation]
        if account.closed or account.overlaps(message.fragment, message.odometer, message.tokens):
            record_contribution(
                self.run, held.learner, held.generation, message, "late", held.arrived_s, 0.0
            )
            return False
        return True

    def _pull(self, member: Member, round_: Round, values: bool = False) -> Pull:
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

    # ------------------------------------------------------------------ contributions

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
        fragment = message.fragment
        held = HeldContribution(
            member.learner,
            member.generation,
            member.join.incarnation,
            message,
            payload,
            member.join.dtype,
            now,
            contribution_weight(message.tokens, message.steps, run.config.algorithm.sync_every),
        )
        round_ = book.open.get(fragment)
        if round_ is not None and round_.number == message.round:
            if round_.involves(member.learner) and member.learner not in round_.left:
                return  # a repeat: once per learner
            self._accept(round_, member, held, now)
        elif message.round >= book.next_round and (message.unasked or message.final):
            if message.final:
                run.final_inbox.setdefault(fragment, {})[member.learner] = held
            else:
                run.early.setdefault(message.round, {})[member.learner] = held
        elif member.account.merged_upto[fragment] != (message.epoch, message.round):
            merging = book.merging.get((message.epoch, message.round))
            if merging is None or not merging.holds(member.learner, member.generation):
                self._late(member, message, now)

    def _accept(self, round_: Round, member: Member, held: HeldContribution, now: float) -> None:
        if needs_values(self.run, held.message):
            self.run.say(member.session, self._pull(member, round_, values=True))
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
        self.check(round_, now)

    def _late(self, member: Member, message: Contribution, now: float) -> None:
        quorum_s = self.quorum_times.get((message.epoch, message.round))
        if quorum_s is not None:
            member.lateness.add(max(0.0, now - quorum_s))
        record_contribution(self.run, member.learner, member.generation, message, "late", now, 0.0)
        closed = (self.run.epoch, message.round)
        self.run.say(
            member.session,
            Closed(generation=member.generation, fragment=message.fragment, round=closed),
        )

    def refuse(self, member: Member, message: Contribution, reason: str, now: float) -> None:
        """Refused whole: counted, the learner told why, taken off the roster."""
        run = self.run
        run.refusals += 1
        record_contribution(self.run, member.learner, member.generation, message, reason, now, 0.0)
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
        round_ = run.book.open.get(message.fragment)
        if round_ is not None:
            self._strike(round_, member.learner, now)

    # ------------------------------------------------------------------ closing

    def _strike(self, round_: Round, learner: str, now: float) -> None:
        if round_.left.pop(learner, None) is not None:
            self.check(round_, now)

    def strike(self, member: Member, now: float) -> None:
        """The member left `training`: rosters shrink; what it has contributed stays."""
        for round_ in list(self.run.book.open.values()):
            self._strike(round_, member.learner, now)

    def check(self, round_: Round, now: float) -> None:
        """Reached the quorum? Complete? Cancelled? The grace window itself ends in `tick` only, so
        that all that arrives at one instant (a window may be 0) is in before it closes."""
        if round_.closed_s is not None or round_.fragment not in self.run.book.open:
            return
        if round_.empty or round_.unreachable:
            self._cancel(round_)
        elif round_.has_quorum:
            if round_.quorum_s is None:
                self._quorum(round_, now)
            if round_.complete:
                self._close(round_, now)

    def _quorum(self, round_: Round, now: float) -> None:
        run = self.run
        round_.quorum_s = now
        for learner in round_.contributions:
            run.members[learner].lateness.add(0.0)
        steps = [run.members[c].steps.value for c in round_.contributions]
        known = [value for value in steps if value is not None]
        if not round_.reanchor and not round_.last:
            run.grace.quorum.add(now - round_.opened_s)
        bounds = [run.members[learner].lateness.bound for learner in round_.left]
        fastest = min(known, default=None)
        window = run.grace.window(fastest, median_step(run.training), bounds)
        round_.grace_s = 0.0 if round_.reanchor else window

    def _cancel(self, round_: Round) -> None:
        run = self.run
        del run.book.open[round_.fragment]
        self._record_cancelled(round_)
        self.bookings.settle_waiting()

    def _record_cancelled(self, round_: Round) -> None:
        self.run.record(
            "round_cancelled", epoch=round_.epoch, round=round_.number, fragment=round_.fragment
        )

    def _close(self, round_: Round, now: float) -> None:
        run = self.run
        run.book.close(round_, now)
        if round_.quorum_s is not None and not round_.last and not round_.reanchor:
            run.grace.spent.add(now - round_.quorum_s)
        self.quorum_times[round_.key] = round_.quorum_s
        while len(self.quorum_times) > 4 * len(run.versions):
            del self.quorum_times[next(iter(self.quorum_times))]
        for learner in round_.left:
            member = run.members[learner]
            closed = Closed(
                generation=member.generation, fragment=round_.fragment, round=round_.key
            )
            run.say(member.session, closed)
        merge = Merge(
            round_.epoch,
            round_.number,
            round_.fragment,
            (run.epoch, run.versions[round_.fragment][1] + 1),
            round_.ordered(),
            round_.reanchor,
        )
        if self.hold:
            self.held_merges.append(merge)
        else:
            self.outstanding += 1
            run.actions.append(merge)

    def release_held(self) -> None:
        """The checkpoint was handed out: merges closed meanwhile follow it."""
        self.hold = False
        self.outstanding += len(self.held_merges)
        self.run.actions.extend(self.held_merges)
        self.held_merges.clear()

    # ------------------------------------------------------------------ merged

    def merged(self, merge: Merge, result: MergeResult, now: float) -> None:
        """Book a merge: version, accounts, who gets the fragment."""
        run = self.run
        self.outstanding -= 1
        fragment, key = merge.fragment, (merge.epoch, merge.round)
        round_ = run.book.merging.pop(key)
        rejected, staleness = dict(result.rejected), dict(result.staleness)
        used = [held for held in merge.contributions if held.learner not in rejected]
        for held in merge.contributions:
            if held.learner in rejected:
                self._reject_at_close(held, rejected[held.learner], now)
                continue
            account = run.accounts[held.incarnation]
            message = held.message
            account.merge(fragment, key, message.odometer, message.tokens, run.book_loss)
            run.contains[fragment] = run.contains[fragment].advanced(held.learner, message.step)
            learner, generation = held.learner, held.generation
            record_contribution(
                run, learner, generation, message, "accepted", held.arrived_s, held.weight,
                staleness.get(learner),
            )  # fmt: skip
        if used:
            run.merges += 1
            run.versions[fragment] = merge.version
            run.made_by[fragment] = key
            run.reanchor.discard(fragment)
            record_merge(run, round_, merge, result, used, now)
            self.bookings.deliveries[fragment] = (merge.version[1], round_.closed_s or now, 0)
        else:  # all were rejected at the close
            self._record_cancelled(round_)
        self._after(round_, fragment, now)

    def _reject_at_close(self, held: HeldContribution, reason: str, now: float) -> None:
        member = self.run.members[held.learner]
        if member.generation == held.generation and member.live:
            self.refuse(member, held.message, reason, now)
        else:
            self.run.refusals += 1
            record_contribution(
                self.run, held.learner, held.generation, held.message, reason, held.arrived_s, 0.0
            )

    def _after(self, round_: Round, fragment: int, now: float) -> None:
        """Who gets the fragment now, and what had waited for this round to close."""
        run = self.run
        for member in run.live:
            involved = round_.holds(member.learner, member.generation) or (
                member.learner in round_.roster
            )
            if fragment in member.withheld:
                behind = run.versions[fragment][1] - member.versions[fragment][1]
                if not involved and behind <= run.config.algorithm.max_stale:
                    continue
                member.withheld.discard(fragment)
                member.held_pull.discard(fragment)
            member.outbox.offer(fragment)
        self.bookings.settle_waiting()
        self.open_due(now)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Repeat pulls, strike the silent, end grace windows and re-anchor waits."""
        run, timeouts = self.run, self.run.config.timeouts
        step = median_step(run.training) or 0.0
        for round_ in list(run.book.open.values()):
            for learner, asked in list(round_.left.items()):
                member = run.members[learner]
                if now >= asked.first_s + timeouts.round:
                    member.last_error = f"no contribution to round {round_.number} in time"
                    self._strike(round_, learner, now)
                elif now >= asked.sent_s + self.pull_timeout(member, step):
                    asked.sent_s = now
                    run.say(member.session, self._pull(member, round_))
            if round_.reanchor and now >= round_.opened_s + timeouts.reanchor and round_.received:
                round_.left.clear()
            self.check(round_, now)
            deadline = round_.deadline
            if round_.closed_s is None and deadline is not None and now >= deadline:
                self._close(round_, now)
        self.open_due(now)

    def pull_timeout(self, member: Member, step: float) -> float:
        """max(least, 4 median steps + RTT)."""
        rtt = (member.rtt_ms or 0.0) / 1000.0
        return max(self.run.config.timeouts.pull_least, 4 * step + rtt)

    def grace_over(self, now: float) -> bool:
        """A grace window has run out: `tick` is due at this instant."""
        deadlines = [round_.deadline for round_ in self.run.book.open.values()]
        return any(deadline is not None and deadline <= now for deadline in deadlines)

    def deadlines(self, now: float) -> list[float]:
        """When `tick` has something to do."""
        run, timeouts = self.run, self.run.config.timeouts
        step = median_step(run.training) or 0.0
        times: list[float] = []
        for round_ in run.book.open.values():
            if round_.deadline is not None:
                times.append(round_.deadline)
            if round_.reanchor:
                times.append(round_.opened_s + timeouts.reanchor)
            for learner, asked in round_.left.items():
                times.append(asked.first_s + timeouts.round)
                times.append(asked.sent_s + self.pull_timeout(run.members[learner], step))
        times += self.openings.deadlines(now)
        return times
