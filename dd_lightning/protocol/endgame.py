"""How a run ends: finished learners hand in, last rounds merge it, a checkpoint holds it.

A finished learner is asked once more for each fragment and stays until every fragment was answered
`nothing` after its merge and a checkpoint holds that merge, or `timeouts.flush`; what it then still
holds is lost (`unsent`). [Without it 11% of a 100-step run's tokens are never merged.]
"""

from __future__ import annotations

from typing import Any

from dd_lightning.protocol.actions import Done, WriteCheckpoint
from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.members import FINISHING, JOINING, Final, Member, median_step
from dd_lightning.protocol.messages import HELD, FinishNow, Nothing, Pull, Released
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState

DISK = "checkpoint"  # key of the warning that one was not written
RETRY_S = (1.0, 60.0)  # first and longest pause before it is tried again


class Endgame:
    """Finals, release of learners, checkpoints on demand, and the run's end."""

    def __init__(self, run: RunState, conductor: Conductor) -> None:
        self.run = run
        self.conductor = conductor
        self.want_checkpoint = False
        self.checkpoint_out = False  # handed out, not yet reported
        self.saved_merges = -1
        self.saved_finished: set[str] = set()  # learners that it knows to be done
        self.asked_merges = -1  # of the one that is handed out
        self.failures = 0  # writes in a row that the disk refused
        self.retry_s = 0.0  # none is handed out before
        self.resumed_s: float | None = None  # since when a resumed run waits for learners
        self.ending_s: float | None = None  # since when the end waits for the last checkpoint
        self.alone_s: float | None = None  # since when all learners but one are done
        self.ending: tuple[str, str] | None = None  # (status, reason) once the end is decided
        self.over = False

    # ------------------------------------------------------------------ finals

    def finish(self, member: Member, now: float) -> None:
        """The learner has done its last step."""
        member.finishing_s = now
        member.finals = {fragment: Final() for fragment in range(len(self.run.versions))}

    def ask(self, member: Member, now: float) -> None:
        """Ask for each fragment that is in no open round of it and not yet handed in."""
        run, book = self.run, self.run.book
        step = median_step(run.live) or 0.0
        for fragment, final in member.finals.items():
            if final.done or self._handed_in(member.learner, fragment):
                continue
            if any(self._was_asked(member, final, r) for r in book.of(fragment)):
                continue  # though struck since: what it was asked for may be on its way
            number = book.next_number_of(fragment)
            fresh = (
                final.pull is not None
                and final.pull.round == number
                and final.pull.base in (HELD, run.versions[fragment])
            )
            patience = self.conductor.pull_timeout(member, step)
            if fresh and now < final.asked_s + patience:
                continue
            held = fragment in member.held_pull
            final.pull = Pull(
                generation=member.generation,
                epoch=run.epoch,
                round=number,
                fragment=fragment,
                base=HELD if held else run.versions[fragment],
                merged_upto=member.account.merged_upto[fragment],
                final=True,
                values=held,
            )
            final.asked_s = now
            run.say(member.session, final.pull)

    def _handed_in(self, learner: str, fragment: int) -> bool:
        """Whether a contribution of it waits for a round of that fragment to open: a final, or one
        that it made unasked, ahead of us."""
        run = self.run
        return learner in run.final_inbox.get(fragment, {}) or any(
            learner in held and run.book.fragment_of(number) == fragment
            for number, held in run.early.items()
        )

    def _anything_handed_in(self) -> bool:
        finishing = self.run.in_state(FINISHING)
        return any(self.run.final_inbox.values()) or any(
            member.learner in held for member in finishing for held in self.run.early.values()
        )

    @staticmethod
    def _was_asked(member: Member, final: Final, round_: Round) -> bool:
        """As one of the roster, or by a final pull before the round opened."""
        by_final_pull = final.pull is not None and final.pull.round == round_.number
        return by_final_pull or round_.was_asked(member.learner)

    def nothing(self, member: Member, message: Nothing, now: float) -> None:
        """It holds nothing of this fragment that no merge has."""
        final = member.finals.get(message.fragment)
        if final is None or final.pull is None or final.pull.round != message.round:
            return
        final.done = True
        member.account.saw(message.odometer)
        if all(f.done for f in member.finals.values()) and member.all_done_s is None:
            member.all_done_s = now

    def last_rounds(self, now: float) -> None:
        """Nobody is left to train: merge what finished learners have handed in, in round order.

        A fragment for which nothing was handed in gets a cancelled round, so that numbers and
        fragment order go on without a gap."""
        run, book = self.run, self.run.book
        while self._anything_handed_in() and run.quiet(now) and run.initialized:
            fragment = book.fragment_of(book.next_round)
            waits = any(
                not final.done and not self._handed_in(member.learner, fragment)
                for member in run.in_state(FINISHING)
                for p, final in member.finals.items()
                if p == fragment
            )
            if waits or book.busy(fragment):
                return
            round_ = self.conductor.open(now, [], last=True)
            self.conductor.closing.check(round_, now)

    # ------------------------------------------------------------------ release

    def release(self, now: float) -> None:
        """Let go those whose work is merged and on disk, or who have waited `flush`."""
        run = self.run
        for member in run.in_state(FINISHING):
            if member.released:
                continue
            flushed = now >= (member.finishing_s or 0.0) + run.config.timeouts.flush
            done = member.all_done_s is not None
            # known to be done too: a syncer resumed from it would wait for a learner that has left
            known = member.learner in self.saved_finished
            safe = done and known and self.saved_merges >= run.merges
            if done and not safe and not self.checkpoint_out:
                self.want_checkpoint = True
            if safe or flushed:
                member.released = True
                run.say(member.session, Released(generation=member.generation))

    def stragglers(self, now: float) -> None:
        """The last learner still training gets `timeouts.finish`; a met budget ends everyone."""
        run = self.run
        busy = [m for m in run.live if m.state != FINISHING]
        others_done = bool(run.finished_learners) or bool(run.in_state(FINISHING))
        alone = len(busy) == 1 and others_done and not run.expects_rejoin(now)
        if not alone:
            self.alone_s = None
        elif self.alone_s is None:
            self.alone_s = now
        budget = run.config.budget_tokens
        if budget is not None and run.tokens_merged >= budget:
            # one that has just joined makes its first step: then a restart is known to have worked
            patience_s = run.config.timeouts.finish
            told = [m for m in busy if m.state != JOINING or now >= m.joined_s + patience_s]
            self.tell(told, f"budget.tokens={budget} merged")
        elif self.alone_s is not None and now >= self.alone_s + run.config.timeouts.finish:
            self.tell(busy, "every other learner has finished")

    def tell(self, members: list[Member], reason: str) -> None:
        """Tell them to stop training at the next boundary."""
        for member in members:
            if not member.told_to_finish:
                member.told_to_finish = reason
                self.run.say(member.session, FinishNow(generation=member.generation, reason=reason))

    # ------------------------------------------------------------------ checkpoint and end

    def stop(self, reason: str) -> None:
        """End now: everyone is told and let go, open rounds are given up, then a checkpoint."""
        run = self.run
        self.tell(run.live, reason)
        for member in run.live:
            member.released = True
            run.say(member.session, Released(generation=member.generation))
        for round_ in list(run.book.open.values()):
            round_.left.clear()
            round_.contributions.clear()
            round_.finals.clear()
            self.conductor.closing.check(round_, 0.0)
        self.ending = self.ending or ("interrupted", reason)

    def checkpoint(self, now: float) -> None:
        """Hand out a checkpoint as soon as no merge is outstanding; one at a time, and what is
        asked for meanwhile is one more after it."""
        if self.checkpoint_out or not self.want_checkpoint or not self.run.initialized:
            return
        if now < self.retry_s:
            return
        self.conductor.closing.hold = True
        if self.conductor.closing.outstanding:
            return
        self.want_checkpoint = False
        self.checkpoint_out = True
        self.asked_merges = self.run.merges
        self.run.actions.append(WriteCheckpoint(self.run.state()))
        self.conductor.closing.release_held()

    def checkpointed(self, state: dict[str, Any]) -> None:
        """The checkpoint with that state is on disk."""
        self.checkpoint_out = False
        self.saved_merges = max(self.saved_merges, state["merges"])
        self.saved_finished = set(state["finished"])
        if self.failures:
            self.failures, self.retry_s = 0, 0.0
            self.run.warned.pop(DISK, None)
            self.run.record("warning", text="checkpoints are written again")

    def not_checkpointed(self, reason: str, now: float) -> None:
        """The disk did not take it: tried again after a pause that doubles. Nothing is lost yet;
        learners that have finished stay, at most `timeouts.flush`, until one is written."""
        self.checkpoint_out = False
        self.want_checkpoint = True
        pause_s = min(RETRY_S[0] * 2.0**self.failures, RETRY_S[1])
        self.failures += 1
        self.retry_s = now + pause_s
        self.run.warn_once(
            DISK, f"no checkpoint: {reason} It is tried again; until then the run goes on without."
        )

    def end(self, now: float) -> None:
        """Decide and carry out the end of the run."""
        run = self.run
        if self.over:
            return
        self.ending = self.ending or self._decide(now)
        if self.ending is None or self._waits_for_checkpoint(now):
            return
        if self.conductor.closing.outstanding:
            return
        self.over = True
        self.conductor.intake.refused.close()
        for account in run.accounts.values():
            if not account.closed:
                account.ended = account.ended or "dead"
                account.close(run.book_loss)
        for learner in sorted({account.learner for account in run.accounts.values()}):
            run.record("ledger", learner=learner, fragments=run.ledger(learner))
        run.actions.append(Done(*self.ending))

    def _decide(self, now: float) -> tuple[str, str] | None:
        """How the run ends, once it is over."""
        run = self.run
        if not run.ever_joined:
            return self._nobody_came_back(now)
        if run.restored_training is not None:
            waits = not run.started
        else:  # no checkpoint says who is to come back
            waits = run.resumed and len(run.slots) < (run.config.learners or 1)
        resumed = waits and now < self.conductor.openings.reanchor_by(now)  # the others may come
        if run.live or run.expects_rejoin(now) or resumed:
            return None
        if run.book.in_flight or any(run.final_inbox.values()):
            return None
        if run.finished_learners:
            return "finished", "every learner has finished"
        if any(m.state == "gone" for m in run.members.values()):
            return "interrupted", "every learner has left"
        return "failed", "every learner is lost"

    def _waits_for_checkpoint(self, now: float) -> bool:
        """Whether the last one is still to come. It is given up after `timeouts.flush`: what was
        merged since the one before it is lost then, and the run has failed."""
        run = self.run
        if self.ending_s is None:
            self.ending_s = now
        unsaved = run.initialized and self.saved_merges < run.merges
        if not unsaved and not self.checkpoint_out:
            return False
        if now < self.ending_s + run.config.timeouts.flush:
            covered = self.checkpoint_out and self.asked_merges >= run.merges
            self.want_checkpoint = self.want_checkpoint or (unsaved and not covered)
            return True
        self.ending = (
            "failed",
            f"the last checkpoint is not on the disk timeouts.flush = "
            f"{run.config.timeouts.flush:g} s after the end; the one before it stands, with "
            f"{max(0, self.saved_merges)} of {run.merges} merges",
        )
        return False

    def _nobody_came_back(self, now: float) -> tuple[str, str] | None:
        """How a resumed run ends that no learner joins; None: it may still come. Nothing is lost by
        it: the checkpoint stands, and the run can be resumed again."""
        run, timeouts = self.run, self.run.config.timeouts
        if not run.resumed:
            return None
        if self.resumed_s is None:
            self.resumed_s = now
        all_done = bool(run.slots) and set(run.slots) <= run.finished_learners
        if now < self.resumed_s + (timeouts.rejoin if all_done else timeouts.resume):
            return None
        if all_done:
            return "finished", "every learner had finished before the syncer was resumed"
        return (
            "failed",
            f"no learner has come back within timeouts.resume = {timeouts.resume:g} s; start "
            "learners, then resume again",
        )

    def deadlines(self, now: float) -> list[float]:
        """When something here falls due."""
        run, timeouts = self.run, self.run.config.timeouts
        step = median_step(run.live) or 0.0
        times = [lost + timeouts.rejoin for lost in run.lost_at.values()]
        if self.alone_s is not None:
            times.append(self.alone_s + timeouts.finish)
        if self.want_checkpoint and self.failures:
            times.append(self.retry_s)
        if self.resumed_s is not None and not run.ever_joined:
            times += [self.resumed_s + timeouts.rejoin, self.resumed_s + timeouts.resume]
        if self.ending_s is not None:
            times.append(self.ending_s + timeouts.flush)
        for member in run.in_state(FINISHING):
            times.append((member.finishing_s or 0.0) + timeouts.flush)
            for final in member.finals.values():
                if not final.done and final.pull is not None:
                    times.append(final.asked_s + self.conductor.pull_timeout(member, step))
        return times
