"""The syncer's sans-IO core: messages and times in, actions out.

No clock, socket, thread or tensor. Whoever drives it (server, simulator, test) passes `now` in
seconds since the run's start, never falling, and carries out `take()` in order. The rules are
`protocol.md`'s; the rooms behind this door are `admission`, `conductor` (rounds), `endgame`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dd_lightning.protocol.actions import Action, MergeResult, SendFragment, SetInitial
from dd_lightning.protocol.actions import Merge as MergeAction
from dd_lightning.protocol.admission import Admission
from dd_lightning.protocol.advice import Advice
from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.cut import Cuts
from dd_lightning.protocol.donations import Donations
from dd_lightning.protocol.endgame import Endgame
from dd_lightning.protocol.layout import build_layout
from dd_lightning.protocol.lifecycle import Lifecycle
from dd_lightning.protocol.members import (
    FINISHING,
    GONE,
    JOINING,
    LOST,
    PAUSED,
    Member,
    median_step,
)
from dd_lightning.protocol.messages import (
    Applied,
    Checkpointed,
    Contribution,
    CutRecorded,
    CutTaken,
    Finish,
    Goodbye,
    Initial,
    Inner,
    Join,
    Message,
    Nothing,
    Progress,
    Received,
    Rejoin,
    StateChunk,
    StateFailed,
    StateLoaded,
    StateReceived,
    TensorInfo,
    Version,
)
from dd_lightning.protocol.observe import status
from dd_lightning.protocol.run_state import RunState
from dd_lightning.protocol.whole_restore import WholeRestore

STATS_EVERY_S = 2.0


class SyncerCore:
    """One epoch of the syncer of one run.

    What a failure loses: a learner killed, the tokens since its last contribution; a syncer
    killed, the merges since its checkpoint as far as learners no longer hold them (`accounts`).

    Args:
        restored: the state of a checkpoint, or of the syncer's record of a cut.
        whole: go on as the run that the cut was taken of, with the learners' parts.
    """

    def __init__(
        self,
        config: SyncerConfig,
        *,
        run_id: str,
        epoch: int,
        restored: dict[str, Any] | None = None,
        resumed: bool = False,  # also where no checkpoint had been written
        whole: bool = False,
    ) -> None:
        self.config = config
        self.run = RunState(config, run_id, epoch)
        self.run.resumed = resumed or restored is not None
        if restored is not None:
            tensors = [TensorInfo(n, tuple(s), k, m) for n, s, k, m in restored["tensors"]]
            self.run.restore(restored, build_layout(tensors, config.algorithm))
        self.admission = Admission(self.run)
        self.conductor = Conductor(self.run)
        self.lifecycle = Lifecycle(self.run, self.admission, self.conductor)
        self.advice = Advice(self.run)
        self.endgame = Endgame(self.run, self.conductor)
        self.donations = Donations(self.run)
        if restored is not None:
            self.endgame.saved_merges = self.run.merges
            self.endgame.saved_finished = set(self.run.finished_learners)
        self.cuts = Cuts(self.run, self.conductor, self.endgame)
        cut = ""
        if whole and restored is not None:  # what a plain `--resume` finds is of the run before
            self.admission.whole = WholeRestore(self.run, self.conductor, restored)
            self.endgame.want_checkpoint = True
            cut = self.admission.whole.cut
        versions = [list(v) for v in self.run.versions]
        self.run.record("syncer_start", epoch=epoch, versions=versions, restored_from=cut)
        self._handlers: dict[type, Callable[..., None]] = {
            Initial: self._initial,
            Progress: self._progress,
            Contribution: self._contribution,
            Nothing: self._nothing,
            Received: self._received,
            Applied: self._applied,
            Checkpointed: self._checkpointed,
            Finish: self._finish,
            Inner: lambda m, message, now, _: self.donations.described(m, message, now),
            StateChunk: lambda m, message, now, data: self.donations.chunk(m, message, data, now),
            StateReceived: lambda m, message, now, _: self.donations.received(m, message, now),
            StateLoaded: lambda m, message, now, _: self.donations.loaded(m, message, now),
            StateFailed: lambda m, message, now, _: self.donations.failed(m, message, now),
            Goodbye: self._goodbye,
            CutRecorded: lambda m, message, now, _: self.cuts.recorded(m, message),
            CutTaken: lambda m, message, now, _: self.cuts.taken(m, message, now),
        }

    # ------------------------------------------------------------------ events in

    def receive(
        self,
        session: str,
        message: Message,
        now: float,
        payload: object = None,
        peer_address: str = "",
    ) -> None:
        """A message has come. `payload`: opaque here, handed back in `Merge` and `SetInitial`."""
        if isinstance(message, Join):
            if self.endgame.ending is None:
                member = self.admission.join(session, message, now, peer_address)
                if member is not None:
                    self.conductor.ask_again(member, now)
                self.conductor.bookings.settle_waiting()  # of a process that this one follows
                self._settle(now)
            return
        member = self._member(session, message)
        if member is None:
            return
        member.reported_s = now
        self._handlers[type(message)](member, message, now, payload)
        self._settle(now)

    def _member(self, session: str, message: Message) -> Member | None:
        generation = message.generation  # type: ignore[attr-defined]
        bound = self.run.sessions.get(session)
        member = self.run.members.get(bound[0]) if bound else None
        if member is None or not member.live or member.generation != generation:
            self.run.fenced += 1
            self.run.say(session, Rejoin(generation=generation))
            return None
        if bound is not None and bound[1] != generation:
            self.run.fenced += 1
            self.run.say(session, Rejoin(generation=generation))
            return None
        return member

    def refuse_payload(self, session: str, message: Message, reason: str, now: float) -> bool:
        """The payload of `message` does not hold (non-finite, byte count, checksum, codec). Whether
        the log is to say so: not each time when a learner repeats it."""
        said = True
        member = self._member(session, message)
        if member is None:
            return False
        if isinstance(message, Contribution):
            said = self.conductor.intake.refuse(member, message, reason, now)
        else:
            self.run.warn_once(
                f"initial {member.learner}",
                f"version 0 from learner {member.learner} is unusable: {reason}",
            )
            self.admission.end(member, LOST, f"initial values: {reason}", now)
        self._settle(now)
        return said

    def disconnected(self, session: str, now: float) -> None:
        """The connection is gone: its generation ends at once, nothing is booked."""
        bound = self.run.sessions.pop(session, None)
        if bound is None:
            return
        member = self.run.members[bound[0]]
        if member.generation != bound[1] or not member.live:
            return
        self.lifecycle.lost(member, "connection closed", now)
        self._settle(now)

    def initialized(self, fragment: int, now: float) -> None:
        """Version 0 of the fragment is published."""
        run = self.run
        run.initial_missing.discard(fragment)
        if run.initial_missing or run.initialized:
            return
        run.initialized = True
        for member in run.live:  # whoever handed it in loads it like everyone else
            for p in range(len(run.versions)):
                if p not in member.withheld:
                    member.outbox.offer(p)
        self.endgame.want_checkpoint = True
        self._settle(now)

    def merged(self, merge: MergeAction, result: MergeResult, now: float) -> None:
        """`merge` has been carried out."""
        self.conductor.merged(merge, result, now)
        self.advice.merged(now)
        self._settle(now)

    def request_checkpoint(self, now: float) -> None:
        """Write one as soon as no merge is outstanding."""
        self.endgame.want_checkpoint = True
        self._settle(now)

    def checkpointed(self, state: dict[str, Any], now: float) -> None:
        """The checkpoint of `WriteCheckpoint(state)` is on disk."""
        self.endgame.checkpointed(state)
        self._settle(now)

    def not_checkpointed(self, reason: str, now: float) -> None:
        """The disk did not take it, and why (a sentence that says what to do)."""
        self.endgame.not_checkpointed(reason, now)
        self._settle(now)

    def request_cut(self, now: float) -> str:
        """Begin a consistent cut of the whole run; its id. `CutDone` or `CutFailed` follows. Raises
        ValueError when none can be taken now, saying why."""
        cut = self.cuts.request(now)
        self._settle(now)
        return cut

    def cut_saved(self, cut: str, now: float, refused: str = "") -> None:
        """The syncer's record of that cut is on disk; or the disk did not take it, and why."""
        self.cuts.saved(cut, refused, now)
        self._settle(now)

    def stop(self, reason: str, now: float) -> None:
        """End now (signal): learners are let go, a last checkpoint is written."""
        self.endgame.stop(reason)
        self._settle(now)

    def tick(self, now: float) -> None:
        """Time has passed."""
        timeouts = self.config.timeouts
        for member in self.run.live:
            if now >= member.reported_s + timeouts.lease:
                self.lifecycle.lost(member, f"no word for {timeouts.lease} s", now)
            elif self.lifecycle.stalled(member) <= now:
                self.lifecycle.move(member, PAUSED, now)
            member.outbox.expire(now - timeouts.round)
        self.admission.repeat_initial(now)
        self.admission.refused.tick(now)
        if self.admission.whole is not None:
            self.admission.whole.tick(now)
        self.conductor.tick(now)
        self._settle(now)

    def next_deadline(self, now: float) -> float | None:
        """When `tick` is next needed, in the driver's seconds; `now` itself only when a grace
        window is over: all that has arrived by then is to be passed in before that tick."""
        if self.conductor.grace_over(now):
            return now
        times = self.conductor.deadlines(now) + self.endgame.deadlines(now) + self.cuts.deadlines()
        if self.admission.whole is not None and self.admission.whole.deadline is not None:
            times.append(self.admission.whole.deadline)
        times += self.admission.refused.deadlines() + self.donations.deadlines()
        if self.admission.initial_deadline is not None:
            times.append(self.admission.initial_deadline)
        for member in self.run.live:
            times.append(member.reported_s + self.config.timeouts.lease)
            times.append(self.lifecycle.stalled(member))
        return min((time for time in times if now < time < math.inf), default=None)

    def take(self) -> list[Action]:
        """The actions to carry out, in order; they are handed out once."""
        actions = list(self.run.actions)
        self.run.actions.clear()
        return actions

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return self.run.state()

    def status(self, now: float) -> dict[str, Any]:
        """For the live table, `status.json` and operators."""
        return status(self.run, self.conductor, self.advice, self.endgame, now)

    # ------------------------------------------------------------------ handlers

    def _initial(self, member: Member, message: Initial, now: float, payload: object) -> None:
        run = self.run
        if run.initialized or member.learner != run.initial_from:
            return
        run.initial_heard_s = now
        if message.fragment in run.initial_missing:
            run.actions.append(SetInitial(message.fragment, payload, message))

    def _progress(self, member: Member, message: Progress, now: float, _: object) -> None:
        self.lifecycle.progress(member, message, now)

    def _contribution(
        self, member: Member, message: Contribution, now: float, payload: object
    ) -> None:
        self.advice.contributed(member, message)
        self.conductor.intake.contribute(member, message, payload, now)

    def _nothing(self, member: Member, message: Nothing, now: float, _: object) -> None:
        self.endgame.nothing(member, message, now)

    def _received(self, member: Member, message: Received, now: float, _: object) -> None:
        if member.outbox.received(message.fragment, message.version) is not None:
            self.conductor.bookings.delivered(member, message.fragment, message.version[1], now)

    def _applied(self, member: Member, message: Applied, now: float, _: object) -> None:
        self.advice.applied(member, message)
        self.conductor.bookings.applied(member, message)

    def _checkpointed(self, member: Member, message: Checkpointed, now: float, _: object) -> None:
        self.run.record(
            "learner_checkpoint",
            learner=member.learner,
            generation=member.generation,
            step=message.step,
            data_position=message.data_position,
        )

    def _finish(self, member: Member, message: Finish, now: float, _: object) -> None:
        if member.state == FINISHING:
            return
        member.account.saw(message.odometer)
        member.step = max(member.step, message.step)
        self.lifecycle.move(member, FINISHING, now)
        self.endgame.finish(member, now)

    def _goodbye(self, member: Member, message: Goodbye, now: float, _: object) -> None:
        self.lifecycle.leave(member, GONE, message.reason, now)

    # ------------------------------------------------------------------ after every event

    def _settle(self, now: float) -> None:
        """Bring rounds, hand-ins, outboxes and the end up to date with what just happened."""
        run = self.run
        run.clock.update(run.training)
        if self.endgame.ending is None:
            self.conductor.open_due(now)
            self.endgame.stragglers(now)
            for member in run.in_state(FINISHING):
                self.endgame.ask(member, now)
            self.endgame.last_rounds(now)
            self.endgame.release(now)
        self.cuts.advance(now)
        self.endgame.checkpoint(now)
        self.endgame.end(now)
        if self.endgame.over:
            self.admission.refused.close()
            self.donations.close()
        self.endgame.checkpoint(now)
        self.donations.settle(now)
        self._pump(now)
        for member in run.live:
            if member.state != JOINING and now - member.stats_s >= STATS_EVERY_S:
                self.lifecycle.stats(member, now)
                self.advice.name_the_slow(member)

    def _pump(self, now: float) -> None:
        """Hand out what the outboxes may send."""
        run = self.run
        if not run.initialized:
            return
        window = self.conductor.openings.limit + 1
        for member in run.live:
            while (fragment := member.outbox.next(window)) is not None:
                if fragment in member.withheld:
                    member.outbox.withdraw(fragment)
                    continue
                version: Version = run.versions[fragment]
                member.outbox.sent(fragment, version, now)
                run.actions.append(
                    SendFragment(
                        member.session,
                        member.generation,
                        fragment,
                        version,
                        run.made_by[fragment],
                        member.account.merged_upto[fragment],
                    )
                )

    @property
    def median_step_s(self) -> float | None:
        """ξ_step, the median over the training learners."""
        return median_step(self.run.training)
