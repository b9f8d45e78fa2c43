"""Conducts the rounds: opens them, repeats pulls, strikes the silent, books merges.

Drives `RoundBook` from the run clock and the members; `protocol.md`, "Rounds", "Messages are
idempotent" and the epoch rules. Contributions are taken in by `intake`, rounds closed by `closing`.
"""

from __future__ import annotations

from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.bookings import Bookings
from dd_lightning.protocol.closing import Closing
from dd_lightning.protocol.intake import Intake
from dd_lightning.protocol.members import Member, median_step
from dd_lightning.protocol.openings import Openings
from dd_lightning.protocol.rounds import Asked, Round
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.verdicts import (
    record_contribution,
    record_merge,
)


class Conductor:
    """Rounds of one epoch. Losing any message costs time only; late work is not merged but stays
    with its learner, which loses it when it next applies that fragment (`absent`)."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.openings = Openings(run)
        self.bookings = Bookings(run)
        self.closing = Closing(run, self.bookings)
        self.intake = Intake(run, self.closing)

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
            quorum=min(run.config.quorum, max(1, len(training))),
        )
        for member in training:
            round_.left[member.learner] = Asked(member.generation, now, now)
            run.say(member.session, self.intake.pull(member, round_))
        for held in run.final_inbox.pop(fragment, {}).values():
            if self.intake.still_good(held):
                round_.finals[held.learner] = held
        for learner, held in run.early.pop(number, {}).items():
            member = run.members.get(learner)
            if member is None or not member.live or member.generation != held.generation:
                continue
            if learner not in round_.finals and self.intake.still_good(held):
                self.intake.accept(round_, member, held, now)
        self._strike_those_past(round_, now)
        return round_

    def _strike_those_past(self, round_: Round, now: float) -> None:
        """`wait: overlap`: who has handed in a later round of this fragment already answers no pull
        of this one. It stands still until that later round closes, which would not open before this
        one has: without this everybody waits until `timeouts.round` strikes somebody."""
        for number, given in list(self.run.early.items()):
            if self.run.book.fragment_of(number) != round_.fragment:
                continue
            for learner, held in given.items():
                asked = round_.left.get(learner)
                if asked is not None and asked.generation == held.generation:
                    self.closing.strike_from(round_, learner, now)

    def ask_again(self, member: Member, now: float) -> None:
        """After a re-attach: the pulls of the open rounds that still wait for this learner. What
        its generation before was asked may never have arrived."""
        member.first_round = self.run.book.next_round
        for round_ in self.run.book.open.values():
            asked = round_.left.get(member.learner)
            if asked is not None:
                asked.generation, asked.sent_s = member.generation, now
                self.run.say(member.session, self.intake.pull(member, round_))

    # ------------------------------------------------------------------ merged

    def merged(self, merge: Merge, result: MergeResult, now: float) -> None:
        """Book a merge: version, accounts, who gets the fragment."""
        run = self.run
        self.closing.outstanding -= 1
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
            self.closing.record_cancelled(round_)
        self._after(round_, fragment, now)

    def _reject_at_close(self, held: HeldContribution, reason: str, now: float) -> None:
        member = self.run.members[held.learner]
        if member.generation == held.generation and member.live:
            self.intake.refuse(member, held.message, reason, now)
        else:
            self.run.refusals += 1
            record_contribution(
                self.run, held.learner, held.generation, held.message, reason, held.arrived_s, 0.0
            )

    def _after(self, round_: Round, fragment: int, now: float) -> None:
        """Who gets the fragment now, and what had waited for this round to close."""
        run = self.run
        never_waits = run.config.algorithm.wait == "never"
        for member in run.live:
            # the roster of a round that was opened before a re-attach had another generation in it,
            # and it closed before this one could hand in what it did while it was cut off
            asked = member.learner in round_.roster
            asked = asked and (round_.number >= member.first_round or not never_waits)
            involved = asked or round_.holds(member.learner, member.generation)
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
        self.intake.refused.tick(now)
        step = median_step(run.training) or 0.0
        for round_ in list(run.book.open.values()):
            for learner, asked in list(round_.left.items()):
                member = run.members[learner]
                if now >= asked.first_s + timeouts.round:
                    member.last_error = f"no contribution to round {round_.number} in time"
                    self.closing.strike_from(round_, learner, now)
                elif now >= asked.sent_s + self.pull_timeout(member, step):
                    asked.sent_s = now
                    run.say(member.session, self.intake.pull(member, round_))
            if round_.reanchor and now >= round_.opened_s + timeouts.reanchor and round_.received:
                round_.left.clear()
            self.closing.check(round_, now)
            deadline = round_.deadline
            if round_.closed_s is None and deadline is not None and now >= deadline:
                self.closing.close(round_, now)
        self.open_due(now)

    def pull_timeout(self, member: Member, step: float) -> float:
        """max(least, 4 median steps + RTT)."""
        rtt = (member.rtt_ms or 0.0) / 1000.0
        return max(self.run.config.timeouts.pull_least, 4 * step + rtt)

    def grace_over(self, now: float) -> bool:
        """A grace window has run out: `tick` is due at this instant."""
        for round_ in self.run.book.open.values():
            deadline = round_.deadline
            if deadline is not None and deadline <= now and not self.closing.held_back(round_):
                return True
        return False

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
        times += self.openings.deadlines(now) + self.intake.refused.deadlines()
        return times
