"""Joins, generations and leases: who is let in, under which generation, and when one ends.

An id has one living holder. Messages of an ended generation get `Rejoin` and do nothing else.
"""

from __future__ import annotations

from typing import Any

from dd_lightning.protocol.accounts import Account
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.members import (
    FINISHING,
    GONE,
    LOST,
    NOTHING_HELD,
    Member,
)
from dd_lightning.protocol.messages import (
    PROTOCOL_VERSION,
    Join,
    Refused,
    SendInitial,
    Welcome,
)
from dd_lightning.protocol.refusals import RefusedJoins
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.whole_restore import WholeRestore


class Admission:
    """Decides on joins and ends generations."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.refused = RefusedJoins(run)
        self.whole: WholeRestore | None = None  # of a run that was restored from a cut

    def join(self, session: str, message: Join, now: float, peer_address: str) -> Member | None:
        """Admit, re-attach, repeat the answer, or refuse. The member, if this is a new one."""
        holder = self.run.members.get(message.learner)
        same_life = holder is not None and holder.join.incarnation == message.incarnation
        if holder is not None and same_life and message.number <= holder.join.number:
            if message.number == holder.join.number and holder.live:
                # a repeated join (the answer was lost): the same generation again
                self.run.sessions.pop(holder.session, None)
                holder.session = session
                holder.reported_s = now
                self.run.sessions[session] = (holder.learner, holder.generation)
                self._welcome(holder)
            return None
        reason = self._objection(message, holder, same_life)
        if reason is not None:
            self._refuse(session, message, reason, now)
            return None
        if holder is not None and holder.live and not same_life and not message.takeover:
            self._refuse(session, message, self._held_by(holder), now, holder)
            return None
        if holder is not None and holder.live:
            self.end(holder, LOST, "re-attached" if same_life else "taken over", now)
        return self._admit(session, message, now, peer_address, same_life)

    def _objection(self, message: Join, holder: Member | None, same_life: bool) -> str | None:
        run = self.run
        if message.protocol != PROTOCOL_VERSION:
            return (
                f"it speaks protocol {message.protocol}, this syncer {PROTOCOL_VERSION}: "
                "run one version of dd_lightning everywhere"
            )
        if message.run_id and message.run_id != run.run_id:
            return f"it belongs to run {message.run_id}, this is run {run.run_id}"
        if self._superseded(message):
            return (
                f"another process (host {holder.join.host or '?'}, pid {holder.join.pid}) has "
                "joined under this id since, so this one is over, and what it had not handed in "
                "is lost. Start it anew, with takeover=true, if it is to replace that one"
                if holder is not None
                else "another process has joined under this id since, so this one is over"
            )
        if run.layout is not None and not same_life:
            difference = run.layout.difference(message.tensors)
            if difference is not None:
                return f"its model is not the run's: {difference}"
        if run.layout is None:
            try:
                build_layout(message.tensors, run.config.algorithm)
            except ValueError as error:
                return str(error)
        if message.learner not in run.slots and len(run.slots) >= run.config.num_data_slots:
            return (
                f"all {run.config.num_data_slots} data slots are taken "
                f"({', '.join(sorted(run.slots))}); raise algorithm.max_learners"
            )
        return None

    def _superseded(self, message: Join) -> bool:
        """Whether another process has joined under the id after this one was admitted last: an
        incarnation ends then, its losses are booked, and it must not come back by itself (two
        processes with takeover=true would displace each other for ever)."""
        latest = self.run.generations.get(message.learner, 0)
        known = self.run.accounts.get(message.incarnation)
        if known is not None:
            return known.generation < latest
        return 0 < message.generation <= latest  # folded, or of an epoch that was undone

    @staticmethod
    def _held_by(holder: Member) -> str:
        return (
            f"its id is held by a live learner on host {holder.join.host or '?'}, pid "
            f"{holder.join.pid}: give this one another id, end that one, or join with takeover=true"
        )

    def _refuse(
        self, session: str, message: Join, reason: str, now: float, holder: Member | None = None
    ) -> None:
        """`holder`: of the id; it may be dead already, and we know by the end of its lease."""
        self.refused.add(message.learner, reason, now)
        text = f"learner {message.learner!r} is refused: {reason}"
        retry_s = self.run.config.timeouts.lease if holder is not None else 0.0
        refused = Refused(number=message.number, reason=text, fatal=holder is None, retry_s=retry_s)
        self.run.say(session, refused)

    def _admit(
        self, session: str, message: Join, now: float, peer_address: str, same_life: bool
    ) -> Member:
        run = self.run
        if run.layout is None:
            run.set_layout(build_layout(message.tensors, run.config.algorithm))
        part = self._part(message, now)
        known = self._account(message, part)
        outlived = part is None and message.continues and message.epoch < run.lineage_epoch
        continues = message.continues and len(message.versions) == len(run.versions)
        continues = continues and not outlived and (part is not None or not message.cut)
        for account in run.accounts.values():
            if account.learner == message.learner and account.incarnation != message.incarnation:
                account.ended = account.ended or "dead"
        generation = run.generations.get(message.learner, 0) + 1
        run.generations[message.learner] = generation
        account = known or Account(message.learner, message.incarnation, len(run.versions))
        account.generation = generation
        run.accounts[message.incarnation] = account
        slot = run.slots.get(message.learner)
        if slot is None:
            slot = run.slots[message.learner] = self._slot(message)
        member = Member(
            message.learner, generation, session, message, account, slot, now,
            peer_address=peer_address, step=message.step, reported_s=now, stepped_s=now,
        )  # fmt: skip
        member.data_position, begins_at = run.positions.admit(
            slot, message, resumes=part is not None
        )
        previous = run.members.get(message.learner)
        if previous is not None and same_life:
            self._carry_over(previous, member)
        for done in message.unheard:
            if done[1] < len(run.versions):
                life = message.incarnation
                run.record_apply(member, message.generation, done, incarnation=life)
        run.members[message.learner] = member
        run.sessions[session] = (member.learner, generation)
        run.lost_at.pop(message.learner, None)
        run.ever_joined = True
        if part is not None and self.whole is not None:
            self.whole.take_back(member, part)
        else:
            self._hand_over(member, continues)
        if outlived:
            self._undo(member)
        member.join_row = dict(
            t_s=now,
            learner=member.learner,
            generation=generation,
            cause="re-attach" if same_life or continues else "join",
            continues=continues,
            state_from=message.state_from,
            state_step=message.state_step,
            data_position=begins_at,
            incarnation=message.incarnation,
            data_slot=slot,
            strategy=message.strategy,
            ranks=message.ranks,
            dtype=message.dtype,
            step=message.step,
            planned=run.config.learners is None or slot < run.config.learners,
            former=message.former if part is not None else "",
            # what the answer says besides: a replay answers the same
            clock=run.clock.value,
            offset=run.book.offset,
            next_round=run.book.next_round,
            start_step=self._start_step(member),
        )
        member.donated = message.wants_state and run.initialized and self._start_step(member) > 0
        if not member.donated:  # else once the transfer has ended, one way or the other
            run.record_join(member, generation)
        self._welcome(member)
        if self.whole is not None:
            self.whole.joined(member, now)
        return member

    def _part(self, message: Join, now: float) -> dict[str, Any] | None:
        """The row of the cut that this join carries on, in a run restored from it."""
        if self.whole is None:
            return None
        self.whole.begin(now)
        return self.whole.row_of(message)

    def _account(self, message: Join, part: dict[str, Any] | None) -> Account | None:
        """The account of this incarnation; or of the one whose part of a cut it carries on."""
        accounts = self.run.accounts
        known = accounts.get(message.incarnation)
        former = accounts.get(message.former)
        if known is not None or former is None or former.learner != message.learner:
            return known
        if former.ended or (message.cut and part is None):
            return None
        del accounts[message.former]
        former.incarnation = message.incarnation
        return former

    def _undo(self, member: Member) -> None:
        """It lived on beside a restore of the run: what it did since the cut is undone."""
        member.reload = True
        for fragment in range(len(self.run.versions)):
            member.account.advance(fragment, member.join.odometer, "rollback", self.run.book_loss)

    @staticmethod
    def _carry_over(previous: Member, member: Member) -> None:
        """What one process life keeps over its generations; estimates of lateness start anew."""
        member.steps = previous.steps
        member.boundaries = previous.boundaries
        member.seconds_stepping = previous.seconds_stepping
        member.first_step_s = previous.first_step_s
        member.losses = previous.losses
        member.on_tape = previous.on_tape
        member.coalesced_most = previous.coalesced_most
        member.rtt_ms = previous.rtt_ms

    def _slot(self, message: Join) -> int:
        taken = set(self.run.slots.values())
        slots = self.run.config.num_data_slots
        wanted = message.data_slot
        if wanted is None and message.learner.isdecimal():
            wanted = int(message.learner)
        if wanted is not None and 0 <= wanted < slots and wanted not in taken:
            return wanted
        return next(slot for slot in range(slots) if slot not in taken)

    def _hand_over(self, member: Member, continues: bool) -> None:
        """Which fragments the learner gets, and which wait for its contribution first."""
        run, join = self.run, member.join
        fragments = range(len(run.versions))
        if not run.initialized:
            if run.initial_from is None:
                run.initial_from = member.learner
            if run.initial_from == member.learner:
                run.initial_heard_s = member.joined_s
        if not continues:
            member.versions = [NOTHING_HELD] * len(run.versions)
            for fragment in fragments if run.initialized else ():
                member.outbox.offer(fragment)
            return
        if run.merges == 0 and not run.started:
            # resumed before its first checkpoint: what the last epoch merged lives on in those who
            # go on, and their average is nearer to it than version 0, one learner's values
            run.reanchor = set(fragments)
        member.versions = [tuple(version) for version in join.versions]  # type: ignore[misc]
        member.account.saw(join.odometer)
        new_epoch = any(version[0] < run.epoch for version in member.versions)
        for fragment in fragments:
            member.held_pull.add(fragment)
            if fragment < len(join.pending):
                unsettled = join.odometer - join.pending[fragment][1]
                cause = "rollback" if new_epoch else ""
                member.account.advance(fragment, unsettled, cause, run.book_loss)
            if self._stale(member, fragment) > run.config.algorithm.max_stale:
                member.outbox.offer(fragment)
                member.held_pull.discard(fragment)
            elif member.versions[fragment] < run.versions[fragment]:
                member.withheld.add(fragment)

    def _stale(self, member: Member, fragment: int) -> int:
        """Merges of the fragment that the learner has not seen, across epochs."""
        held, current = member.versions[fragment], self.run.versions[fragment]
        return max(0, current[1] - held[1])

    def _welcome(self, member: Member) -> None:
        run = self.run
        assert run.layout is not None
        run.say(
            member.session,
            Welcome(
                learner=member.learner,
                number=member.join.number,
                generation=member.generation,
                epoch=run.epoch,
                run_id=run.run_id,
                config=run.config.to_dict(),
                fragments=run.layout.fragments,
                averaged=tuple(sorted(run.layout.averaged)),
                fingerprint=run.layout.fingerprint,
                send_initial=not run.initialized and run.initial_from == member.learner,
                clock=run.clock.value,
                offset=run.book.offset,
                next_round=run.book.next_round,
                merged_upto=tuple(member.account.merged_upto),
                data_slot=member.data_slot,
                num_data_slots=run.config.num_data_slots,
                data_position=member.data_position,
                start_step=self._start_step(member),
                peer_address=member.peer_address,
                donated=member.donated,
                cut=member.join.cut if member.resumes else "",
                reload=member.reload,
            ),
        )

    def _start_step(self, member: Member) -> int:
        """Steps a learner without a state of its own counts from: a planned one has its own
        steps to do; a newcomer, or one that lost everything, starts at the run's clock."""
        learners = self.run.config.learners
        planned = learners is not None and member.data_slot < learners
        first = member.generation == 1 and not member.join.continues
        return 0 if first and (planned or not self.run.started) else self.run.clock.value

    def end(self, member: Member, state: str, cause: str, now: float) -> None:
        """End a generation: GONE (it said so) or LOST. Nothing is booked for a lost one: it may
        come back and contribute what it holds; only when another process takes its id, or the
        run ends, is that lost (`dead`)."""
        run = self.run
        if not member.live:
            return
        finished = member.state == FINISHING
        member.state = state
        run.record_join(member, member.generation)
        if state == GONE:
            member.account.ended = "unsent"
            if finished:
                run.finished_learners.add(member.learner)
            run.record("leave", learner=member.learner, generation=member.generation, cause=cause)
        else:
            if cause not in ("re-attached", "taken over"):
                run.lost_at[member.learner] = now
            run.record("dead", learner=member.learner, generation=member.generation, cause=cause)
        if run.initial_from == member.learner and not run.initialized:
            run.initial_from = None
            heir = next((m for m in run.live), None)
            if heir is not None:
                run.initial_from = heir.learner
                run.initial_missing = set(range(len(run.versions)))
                run.initial_heard_s = now
                run.say(heir.session, SendInitial(generation=heir.generation))

    @property
    def initial_deadline(self) -> float | None:
        """When version 0 is asked for again: nothing of it has come for half of the time that the
        learner waits for its first fragments. None: nothing is awaited."""
        run = self.run
        if run.initialized or run.initial_from is None:
            return None
        return run.initial_heard_s + run.config.timeouts.connect / 2

    def repeat_initial(self, now: float) -> None:
        """Version 0 may have been lost on its way."""
        run, deadline = self.run, self.initial_deadline
        if deadline is not None and now >= deadline and run.initial_from is not None:
            run.initial_heard_s = now
            holder = run.members[run.initial_from]
            run.say(holder.session, SendInitial(generation=holder.generation))
