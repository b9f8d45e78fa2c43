"""States of the learners: what their reports make of them, and when they stall or leave.

joining → training ⇄ paused → finishing → gone; or lost. Rosters shrink when one leaves training.
"""

from __future__ import annotations

import math

from dd_lightning.protocol.admission import Admission
from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.members import FINISHING, GONE, LOST, PAUSED, TRAINING, Member
from dd_lightning.protocol.messages import FinishNow, Pong, Progress, Released
from dd_lightning.protocol.observe import learner_stats
from dd_lightning.protocol.run_state import RunState

PAUSE_STEPS, PAUSE_SECONDS = 10, 5.0  # no step for max of both: paused


class Lifecycle:
    """Moves members from state to state. Losing a report costs time only."""

    def __init__(self, run: RunState, admission: Admission, conductor: Conductor) -> None:
        self.run = run
        self.admission = admission
        self.conductor = conductor

    def progress(self, member: Member, message: Progress, now: float) -> None:
        """A report, which is the heartbeat too: counters, estimates, and what it has not heard."""
        member.account.saw(message.odometer)
        self.run.positions.heard(member.data_slot, message.data_position)
        if member.released:  # it has not heard
            self.run.say(member.session, Released(generation=member.generation))
        elif member.told_to_finish and member.state != FINISHING:
            finish = FinishNow(generation=member.generation, reason=member.told_to_finish)
            self.run.say(member.session, finish)
        member.seconds_stepping = max(member.seconds_stepping, message.seconds_stepping)
        member.losses = message.losses or member.losses
        member.last_error = message.last_error or member.last_error
        if message.rtt_ms is not None:
            member.rtt_ms = message.rtt_ms
        if message.ping:
            self.run.say(member.session, Pong(generation=member.generation, ping=message.ping))
        if message.step > member.step and member.state != FINISHING:
            for seconds in message.step_seconds:
                member.steps.add(seconds)
            member.boundaries.extend(message.boundary_seconds)
            member.coalesced_most = max(member.coalesced_most, message.step - member.step)
            if member.clock_base is None:
                member.clock_base = self.run.clock.value - member.join.step
            member.step = message.step
            member.stepped_s = now
            if member.first_step_s is None:
                member.first_step_s = max(0.0, now - sum(message.step_seconds))
            self.move(member, TRAINING, now)
        member.waiting = message.state == "waiting"
        if message.state == "paused":
            self.move(member, PAUSED, now)

    def stalled(self, member: Member) -> float:
        """When it counts as paused for want of steps; never while it waits inside a boundary."""
        if member.state != TRAINING or member.waiting:
            return math.inf
        return member.stepped_s + max(PAUSE_STEPS * (member.steps.value or 0.0), PAUSE_SECONDS)

    def move(self, member: Member, state: str, now: float) -> None:
        """joining → training ⇄ paused → finishing; rosters shrink when it leaves training."""
        if member.state == state or (state == PAUSED and member.state != TRAINING):
            return
        left_training = member.state == TRAINING
        member.state = state
        self.run.record_join(member, member.generation)
        self.run.record(
            "state",
            learner=member.learner,
            generation=member.generation,
            state=state,
            step=member.step,
            odometer=member.account.odometer,
            first_step_started_s=member.first_step_s,
        )
        if left_training:
            self.conductor.closing.strike(member, now)

    def lost(self, member: Member, cause: str, now: float) -> None:
        """Its connection is gone or silent. A released one has finished: whether it heard of that
        does not matter, for all that it was to hand in is on disk, or was waited for."""
        if member.released:
            self.leave(member, GONE, "finished", now)
        else:
            self.leave(member, LOST, cause, now)

    def leave(self, member: Member, state: str, cause: str, now: float) -> None:
        """Its generation ends; what waits for it goes on without it."""
        self.admission.end(member, state, cause, now)
        self.stats(member, now)
        self.conductor.closing.strike(member, now)
        self.conductor.bookings.settle_waiting()

    def stats(self, member: Member, now: float) -> None:
        """Its figures to the tape."""
        member.stats_s = now
        self.run.record("learner_stats", **learner_stats(member, self.conductor))
