"""Conducts the rounds: opens them, takes contributions, closes and books merges.

Drives `RoundBook` from the run clock and the members; `protocol.md`, "Rounds", "Grace window",
"Messages are idempotent" and the epoch rules are carried out here.
"""

from __future__ import annotations

from dd_lightning.algorithm import contribution_weight
from dd_lightning.protocol.actions import HeldContribution, Merge, MergeResult
from dd_lightning.protocol.estimates import in_flight_bound
from dd_lightning.protocol.members import Member, median_rho, median_step
from dd_lightning.protocol.messages import HELD, Applied, Closed, Contribution, Pull, Verdict
from dd_lightning.protocol.rounds import Asked, Round
from dd_lightning.protocol.run_state import RunState

KEPT_VERSIONS = 4  # per fragment, to anchor deltas
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
        self.deliveries: dict[int, tuple[int, float, int]] = {}  # fragment: n, closed_s, received
        self.waiting_applies: list[tuple[Member, Applied]] = []
        self.first_training_s: float | None = None
        self.epoch_began_s: float | None = None  # `now` goes on over a restart, epochs do not

    # ------------------------------------------------------------------ opening

    @property
    def limit(self) -> int:
        """`max_in_flight` now."""
        run = self.run
        configured = run.config.algorithm.max_in_flight
        fragments = len(run.versions)
        if isinstance(configured, int):
            return min(configured, fragments)
        if run.config.algorithm.wait == "overlap":
            return fragments  # learners bound themselves: none runs more than tau steps ahead
        training = run.training
        transfers = sorted(member.transfer_s for member in training)
        return in_flight_bound(
            median_rho(training),
            median_step(training),
            run.grace.spent.value or 0.0,
            transfers[len(transfers) // 2] if transfers else 0.0,
            run.config.algorithm.sync_every,
            fragments,
        )

    def may_start(self, now: float) -> bool:
        """`min_learners` are training, or `start_timeout` has passed since the first did; in a
        resumed epoch: as many have re-attached as the checkpoint counted."""
        run = self.run
        if run.restored_training is not None:
            enough = len(run.live) >= run.restored_training
            return enough or (bool(run.live) and now >= self.reanchor_by(now))
        training = run.training
        if training and self.first_training_s is None:
            self.first_training_s = now
        if len(training) >= run.config.min_learners:
            return True
        began_s = self.first_training_s
        if not training or began_s is None or now < began_s + run.config.timeouts.start:
            return False
        run.warn_once(
            "start",
            f"rounds start with {len(training)} of min_learners="
            f"{run.config.min_learners} learners after timeouts.start",
        )
        return True

    def reanchor_by(self, now: float) -> float:
        """Until when a resumed epoch waits for those who trained; counted from its first event."""
        if self.epoch_began_s is None:
            self.epoch_began_s = now
        return self.epoch_began_s + self.run.config.timeouts.reanchor

    def open_due(self, now: float) -> None:
        """Open every round that may open now, in order."""
        run, book = self.run, self.run.book
        if not run.initialized:
            return
        if not run.started:
            if not self.may_start(now):
                return
            run.started = True
            run.record("start", epoch=run.epoch, training=[m.learner for m in run.training])
        while True:
            book.skip_lag(run.clock.value)
            fragment = book.fragment_of(book.next_round)
            training = run.training
            degrade = run.config.algorithm.on_lost_quorum == "degrade"
            if (
                not training
                or not book.due(run.clock.value)
                or book.busy(fragment)
                or book.in_flight >= self.limit
                or (not degrade and len(training) < run.config.quorum)
            ):
                return
            self.open(now, training)

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
            self._record(held.learner, held.generation, message, "late", held.arrived_s, 0.0)
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
        reason = self._objection(member, message)
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

    def _objection(self, member: Member, message: Contribution) -> str | None:
        run = self.run
        assert run.layout is not None
        fragment = message.fragment
        if message.fingerprint != run.layout.fingerprint:
            return "layout"
        if not 0 <= fragment < len(run.versions):
            return "fragment"
        if message.epoch != run.epoch:
            return "epoch"
        if message.round < 1 or run.book.fragment_of(message.round) != fragment:
            return "round"
        if message.steps < 1 or message.tokens < 1:
            return "empty"
        if message.base[0] == run.epoch and message.base > run.versions[fragment]:
            return "base"
        if message.base[0] > run.epoch:
            return "base"
        if member.account.overlaps(fragment, message.odometer, message.tokens):
            upto = member.account.merged_upto[fragment]
            # a repeat of what was merged is late, not wrong
            return None if upto == (message.epoch, message.round) else "counters"
        return None

    def _needs_values(self, message: Contribution) -> bool:
        """A delta whose base is no longer kept, or of an earlier epoch, cannot be anchored."""
        if message.payload.kind != "delta":
            return False
        current = self.run.versions[message.fragment]
        return message.base[0] != current[0] or current[1] - message.base[1] >= KEPT_VERSIONS

    def _accept(self, round_: Round, member: Member, held: HeldContribution, now: float) -> None:
        if self._needs_values(held.message):
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
        self._record(member.learner, member.generation, message, "late", now, 0.0)
        closed = (self.run.epoch, message.round)
        self.run.say(
            member.session,
            Closed(generation=member.generation, fragment=message.fragment, round=closed),
        )

    def _record(
        self,
        learner: str,
        generation: int,
        message: Contribution,
        verdict: str,
        arrived_s: float,
        weight: float,
        staleness: int | None = None,
    ) -> None:
        self.run.record(
            "contribution",
            t_s=arrived_s,
            epoch=message.epoch,
            round=message.round,
            fragment=message.fragment,
            learner=learner,
            generation=generation,
            step=message.step,
            steps=message.steps,
            tokens=message.tokens,
            base_version=list(message.base),
            digest=message.payload.digest,
            verdict=verdict,
            weight=weight,
            odometer=message.odometer,
            bytes=message.payload.num_bytes,
            final=message.final,
            staleness=staleness,
        )

    def refuse(self, member: Member, message: Contribution, reason: str, now: float) -> None:
        """Refused whole: counted, the learner told why, taken off the roster."""
        run = self.run
        run.refusals += 1
        self._record(member.learner, member.generation, message, reason, now, 0.0)
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
        run.record(
            "round_cancelled", epoch=round_.epoch, round=round_.number, fragment=round_.fragment
        )
        self.settle_waiting()

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
            self._record(
                held.learner, held.generation, message, "accepted", held.arrived_s, held.weight,
                staleness.get(held.learner),
            )  # fmt: skip
        if used:
            run.merges += 1
            run.versions[fragment] = merge.version
            run.made_by[fragment] = key
        run.reanchor.discard(fragment)
        self._record_merge(round_, merge, result, used, now)
        self._after(round_, fragment, now)

    def _reject_at_close(self, held: HeldContribution, reason: str, now: float) -> None:
        member = self.run.members[held.learner]
        if member.generation == held.generation and member.live:
            self.refuse(member, held.message, reason, now)
        else:
            self.run.refusals += 1
            self._record(held.learner, held.generation, held.message, reason, held.arrived_s, 0.0)

    def _record_merge(
        self,
        round_: Round,
        merge: Merge,
        result: MergeResult,
        used: list[HeldContribution],
        now: float,
    ) -> None:
        run = self.run
        quorum_s = round_.quorum_s if round_.quorum_s is not None else round_.opened_s
        run.record(
            "merge",
            epoch=merge.epoch,
            round=merge.round,
            fragment=merge.fragment,
            version=list(run.versions[merge.fragment]),
            contributors=[held.learner for held in used],
            weights=[held.weight for held in used],
            quorum_s=quorum_s - round_.opened_s,
            grace_s=(round_.closed_s or now) - quorum_s,
            agreement=result.agreement,
            digest=result.digest,
            tokens_merged=run.tokens_merged,
            reanchor=merge.reanchor,
            last=round_.last,
            outer_norm=result.outer_norm,
            norms=dict(result.norms),
            merge_s=result.seconds,
            opened_s=round_.opened_s,
            clock=dict(run.contains[merge.fragment]),
        )
        for learner in round_.roster:
            member = run.members[learner]
            member.took_part.append(any(held.learner == learner for held in used))
            while len(member.took_part) > 4 * len(run.versions):
                member.took_part.popleft()
        self.deliveries[merge.fragment] = (merge.version[1], round_.closed_s or now, 0)

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
        self.settle_waiting()
        self.open_due(now)

    # ------------------------------------------------------------------ applies

    def applied(self, member: Member, message: Applied) -> None:
        """The learner applied a fragment: what it overwrote is lost, once any round that holds a
        contribution of it has closed (the contribution may yet be merged)."""
        run = self.run
        if not 0 <= message.fragment < len(run.versions):
            return
        if message.version > member.versions[message.fragment]:
            member.versions[message.fragment] = message.version
            member.held_pull.discard(message.fragment)
            run.record(
                "apply",
                learner=member.learner,
                generation=member.generation,
                step=message.step,
                epoch=message.version[0],
                fragment=message.fragment,
                version=list(message.version),
            )
        self.waiting_applies.append((member, message))
        self.settle_waiting()

    def settle_waiting(self) -> None:
        """Book what waited for a round to close, then the ends of incarnations."""
        run = self.run
        busy = {round_.fragment: round_ for round_ in run.book.all()}
        kept = []
        for member, message in self.waiting_applies:
            if message.fragment in busy:  # roster or not, a contribution may still come
                kept.append((member, message))
                continue
            cause = "mixed" if run.config.algorithm.apply == "mix" else ""
            member.account.advance(
                message.fragment, message.odometer - message.tokens, cause, run.book_loss
            )
        self.waiting_applies = kept
        unbooked = {member.join.incarnation for member, _ in kept}
        for inbox in run.final_inbox.values():  # handed in: the next round of it merges them
            unbooked |= {held.incarnation for held in inbox.values()}
        for account in run.accounts.values():
            involved = any(round_.involves(account.learner) for round_ in busy.values())
            ready = not involved and account.incarnation not in unbooked
            if account.ended and not account.closed and ready:
                account.close(run.book_loss)

    def delivered(self, member: Member, fragment: int, n: int, now: float) -> None:
        """A fragment has arrived at a learner: a merge's K-th arrival is a sample of ξ_sync."""
        entry = self.deliveries.get(fragment)
        if entry is None or entry[0] != n:
            return
        version, closed_s, count = entry
        count += 1
        if count == min(self.run.config.quorum, max(1, len(self.run.training))):
            self.run.grace.sync.add(now - closed_s)
        self.deliveries[fragment] = (version, closed_s, count)

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
        if not run.started and run.initialized:
            if run.restored_training is not None:
                times.append(self.reanchor_by(now))
            elif self.first_training_s is not None:
                times.append(self.first_training_s + timeouts.start)
        return times
