"""A consistent cut of the whole run, the syncer's side: markers, and nobody is stopped.

Each learner records its state at the end of a batch and stamps what it sends from then on. Until
the syncer has made its own record it merges what is unstamped, holds back every round that has a
stamped contribution, and puts off what stamped applies would book. Its record comes last. So it
holds no work from after a learner's record, and no learner's record a version it does not have:
whatever was on its way is in the learners' records (one unsettled snapshot per fragment).

Under `wait: overlap`, where a learner inside a boundary waits for rounds that might be held back,
all record at one own clock: that of the next round's apply, which nobody is past. Not in a cut: a
learner that is gone by then, or joins meanwhile (`without` says who, and why).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dd_lightning.protocol.actions import CutDone, CutFailed, WriteCheckpoint
from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.endgame import Endgame
from dd_lightning.protocol.members import FINISHING, Member, median_step
from dd_lightning.protocol.messages import (
    CutOver,
    CutRecorded,
    CutTaken,
    TakeCut,
)
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState

WAITS_FOR_RECORDS, WAITS_FOR_FILES = "records", "files"


@dataclass(slots=True)
class Part:
    """One learner's part, under the generation that was asked."""

    generation: int
    told_s: float
    recorded: CutRecorded | None = None
    taken: CutTaken | None = None


@dataclass(slots=True)
class UnderWay:
    """The cut that is being taken."""

    cut: str
    began_s: float
    deadline_s: float
    at_clock: int | None
    parts: dict[str, Part]
    phase: str = WAITS_FOR_RECORDS
    holds: bool = False  # somebody has recorded: rounds may be held back
    without: dict[str, str] = field(default_factory=dict)  # learner to why
    manifest: dict[str, Any] = field(default_factory=dict)  # once the record is made
    saved: bool = False  # the syncer's own record is on disk


class Cuts:
    """Takes one cut at a time. `timeouts.cut` bounds the holding back, `timeouts.flush` the files;
    past either the cut has failed, in words, and nothing else has changed."""

    def __init__(self, run: RunState, conductor: Conductor, endgame: Endgame) -> None:
        self.run = run
        self.conductor = conductor
        self.endgame = endgame
        self.number = 0  # of the last one
        self.under_way: UnderWay | None = None
        conductor.closing.held_back = self.holds_back
        conductor.bookings.put_off = self.puts_off

    # ------------------------------------------------------------------ asked for

    def request(self, now: float) -> str:
        """Begin one; its id. Raises ValueError when none can be taken now, saying why."""
        run = self.run
        objection = self._objection()
        at_clock = self._common_clock() if run.config.algorithm.wait == "overlap" else None
        if not objection and at_clock is not None:
            objection = self._ends_before(at_clock)
        if objection:
            raise ValueError(f"no cut can be taken now: {objection}")
        self.number += 1
        cut = f"c{self.number}"
        to_go = 0
        if at_clock is not None:
            to_go = at_clock - min((m.clock or 0) for m in run.live)
        patience_s = run.config.timeouts.cut + 2 * to_go * (median_step(run.training) or 0.0)
        parts = {m.learner: Part(m.generation, now) for m in run.live}
        self.under_way = UnderWay(cut, now, now + patience_s, at_clock, parts)
        for member in run.live:
            self._tell(member)
        run.record("cut", cut=cut, state="asked", learners=sorted(parts), at_clock=at_clock)
        return cut

    def _objection(self) -> str:
        run = self.run
        if self.under_way is not None:
            return f"{self.under_way.cut} is under way"
        if self.endgame.ending is not None or run.in_state(FINISHING):
            return "the run is ending, and its last checkpoint holds everything"
        if not run.initialized or not run.started:
            return "its rounds have not started yet"
        if not run.live:
            return "no learner is there"
        return ""

    def _common_clock(self) -> int:
        """Of the next round's apply: who is there waits for that round, which is not open yet."""
        run, algorithm = self.run, self.run.config.algorithm
        due = -(
            -(run.book.next_round * algorithm.sync_every + run.book.offset) // run.book.fragments
        )
        furthest = max((member.clock or 0 for member in run.live), default=0)
        return max(due + algorithm.overlap, furthest + 1)

    def _ends_before(self, at_clock: int) -> str:
        for member in self.run.live:
            steps = member.join.max_steps or self.run.config.max_steps
            own_step = at_clock - (member.clock_base or 0)
            if steps is not None and own_step >= steps:
                return (
                    f"learner {member.learner} ends at its step {steps}, before the common one "
                    f"({own_step}) at which all would record"
                )
        return ""

    # ------------------------------------------------------------------ what the others ask

    def holds_back(self, round_: Round) -> bool:
        """The round has a contribution from after its learner's record, and ours is to come."""
        cut = self.under_way
        if cut is None or cut.phase != WAITS_FOR_RECORDS:
            return False
        held = (*round_.contributions.values(), *round_.finals.values())
        return any(each.message.cut == cut.cut for each in held)

    def puts_off(self, stamp: str) -> bool:
        """What is so stamped is from after its learner's record, and ours is to come."""
        cut = self.under_way
        return cut is not None and cut.phase == WAITS_FOR_RECORDS and stamp == cut.cut

    # ------------------------------------------------------------------ what is heard

    def recorded(self, member: Member, message: CutRecorded) -> None:
        """The learner has recorded its part."""
        part = self._part(member, message.cut)
        if part is not None and part.recorded is None:
            part.recorded = message

    def taken(self, member: Member, message: CutTaken, now: float) -> None:
        """Its part is on disk, or could not be written."""
        part = self._part(member, message.cut)
        if part is None:
            return
        if message.error:
            self._fail(f"learner {member.learner} could not write its part: {message.error}", now)
        else:
            part.taken = message

    def _part(self, member: Member, cut: str) -> Part | None:
        if self.under_way is None or self.under_way.cut != cut:
            return None
        part = self.under_way.parts.get(member.learner)
        return part if part is not None and part.generation == member.generation else None

    def saved(self, cut: str, refused: str, now: float) -> None:
        """The syncer's own record is on disk; or the disk did not take it, and why."""
        if self.under_way is None or self.under_way.cut != cut:
            return
        if refused:
            self._fail(refused, now)
        else:
            self.under_way.saved = True

    # ------------------------------------------------------------------ after every event

    def advance(self, now: float) -> None:
        """Bring the cut up to date with what just happened."""
        cut = self.under_way
        if cut is None:
            return
        self._drop_the_gone(cut)
        self._bound_the_hold(cut, now)
        if not cut.parts:
            self._fail("no learner that was asked is left", now)
        elif self.endgame.ending is not None:
            self._fail("the run is ending", now)
        elif now >= cut.deadline_s:
            self._fail(self._too_late(cut), now)
        elif cut.phase == WAITS_FOR_RECORDS:
            self._record_if_ready(cut, now)
        elif cut.saved and all(part.taken is not None for part in cut.parts.values()):
            self._done(cut, now)
        if self.under_way is not None:
            self._tell_again(cut, now)

    def _drop_the_gone(self, cut: UnderWay) -> None:
        """Whoever died, left or joined anew goes without; whose part is on disk may go."""
        for learner, part in list(cut.parts.items()):
            member = self.run.members[learner]
            there = member.live and member.generation == part.generation
            if not there and (part.taken is None or part.recorded is None):
                del cut.parts[learner]
                anew = member.generation != part.generation
                cut.without[learner] = "joined anew" if anew else f"is {member.state}"
        for member in self.run.live:
            if member.learner not in cut.parts and cut.phase == WAITS_FOR_RECORDS:
                cut.without.setdefault(member.learner, "joined meanwhile")

    def _bound_the_hold(self, cut: UnderWay, now: float) -> None:
        """From the first record on: a marker may have been lost, but not what it had stamped."""
        recorded = any(part.recorded is not None for part in cut.parts.values())
        if not cut.holds and (recorded or any(map(self.holds_back, self.run.book.all()))):
            cut.holds = True
            cut.deadline_s = min(cut.deadline_s, now + self.run.config.timeouts.cut)

    def _record_if_ready(self, cut: UnderWay, now: float) -> None:
        finishing = [m.learner for m in self.run.in_state(FINISHING) if m.learner in cut.parts]
        late = [name for name in finishing if cut.parts[name].recorded is None]
        if late:
            self._fail(f"learner {late[0]} did its last step before it had recorded", now)
            return
        closing = self.conductor.closing
        if any(part.recorded is None for part in cut.parts.values()):
            return
        closing.hold = True
        if closing.outstanding:
            return
        self.run.actions.append(WriteCheckpoint(self._record(cut)))
        cut.phase, cut.saved = WAITS_FOR_FILES, False
        cut.deadline_s = now + self.run.config.timeouts.flush
        self.run.record("cut", cut=cut.cut, state="recorded", seconds=now - cut.began_s)
        closing.release_held()
        self._release(now)

    def _release(self, now: float) -> None:
        """Nothing is held back any more."""
        for round_ in list(self.run.book.open.values()):
            self.conductor.closing.check(round_, now)
        self.conductor.bookings.settle_waiting()

    def _record(self, cut: UnderWay) -> dict[str, Any]:
        """What a checkpoint holds, with all that a restore as a whole needs besides."""
        run, state = self.run, self.run.state()
        incarnations = {}
        for learner, part in cut.parts.items():
            member = run.members[learner]
            assert part.recorded is not None  # all have
            incarnations[member.join.incarnation] = part.recorded
            cut.manifest.setdefault("learners", {})[learner] = {
                "generation": part.generation,
                "incarnation": member.join.incarnation,
                "step": part.recorded.step,
                "odometer": part.recorded.odometer,
            }
        for account in state["accounts"]:  # a report may be from after the record
            if account["incarnation"] in incarnations:
                account["odometer"] = incarnations[account["incarnation"]].odometer
        state["finished"] = [name for name in state["finished"] if name not in cut.parts]
        cut.manifest |= {name: state[name] for name in ("epoch", "merges", "versions", "run_id")}
        cut.manifest["tokens_merged"] = state["tokens_merged"]
        state["cut"] = {
            "id": cut.cut,
            "open": sorted(round_.number for round_ in run.book.all()),
            "made_by": [list(key) for key in run.made_by],
            "learners": {
                learner: self._member_record(run.members[learner], row)
                for learner, row in cut.manifest["learners"].items()
            },
        }
        return state

    @staticmethod
    def _member_record(member: Member, row: dict[str, Any]) -> dict[str, Any]:
        return row | {
            "clock_base": member.clock_base,
            "held_pull": sorted(member.held_pull),
            "withheld": sorted(member.withheld),
        }

    # ------------------------------------------------------------------ ends

    def _done(self, cut: UnderWay, now: float) -> None:
        learners = {
            learner: row | {"file": cut.parts[learner].taken.file}  # type: ignore[union-attr]
            for learner, row in cut.manifest["learners"].items()
            if learner in cut.parts
        }
        manifest = cut.manifest | {
            "cut": cut.cut,
            "learners": learners,
            "without": cut.without,
            "seconds": now - cut.began_s,
        }
        self._end(cut, now, "done")
        self.run.actions.append(CutDone(cut.cut, manifest))

    def _fail(self, reason: str, now: float) -> None:
        cut = self.under_way
        assert cut is not None  # callers look
        self._end(cut, now, "failed", reason=reason)
        self.run.actions.append(CutFailed(cut.cut, reason))
        if cut.phase == WAITS_FOR_RECORDS:
            self._release(now)

    def _end(self, cut: UnderWay, now: float, state: str, **fields: Any) -> None:
        self.under_way = None
        for learner in cut.parts:
            member = self.run.members[learner]
            over = CutOver(generation=member.generation, cut=cut.cut, complete=state == "done")
            self.run.say(member.session, over)
        self.run.record("cut", cut=cut.cut, state=state, seconds=now - cut.began_s, **fields)

    def _too_late(self, cut: UnderWay) -> str:
        """Who is waited for, and what to do."""
        records = cut.phase == WAITS_FOR_RECORDS
        waited = [
            f"{learner} ({self.run.members[learner].state})"
            for learner, part in sorted(cut.parts.items())
            if (part.recorded if records else part.taken) is None
        ]
        if not waited:
            return "the syncer's own record was not written in time"
        bound = "cut" if records else "flush"
        seconds = getattr(self.run.config.timeouts, bound)
        did = "recorded" if records else "written"
        return (
            f"learner {', '.join(waited)} had not {did} its part within timeouts.{bound} = "
            f"{seconds:g} s; ask again, or raise it"
        )

    # ------------------------------------------------------------------ time

    def _tell(self, member: Member) -> None:
        assert self.under_way is not None
        order = TakeCut(
            generation=member.generation,
            cut=self.under_way.cut,
            at_clock=self.under_way.at_clock,
        )
        self.run.say(member.session, order)

    def _tell_again(self, cut: UnderWay, now: float) -> None:
        """The order, or the answer to it, may have been lost."""
        for learner, part in cut.parts.items():
            waits = part.taken is None or part.recorded is None
            if waits and now >= part.told_s + self._patience(learner):
                part.told_s = now
                self._tell(self.run.members[learner])

    def _patience(self, learner: str) -> float:
        step = median_step(self.run.training) or 0.0
        return self.conductor.pull_timeout(self.run.members[learner], step)

    def deadlines(self) -> list[float]:
        """When something here falls due."""
        cut = self.under_way
        if cut is None:
            return []
        told = [part.told_s + self._patience(learner) for learner, part in cut.parts.items()]
        return [cut.deadline_s, *told]
