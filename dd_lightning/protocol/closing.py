"""Closes rounds: quorum, grace window, cancellation, and the merges handed out for them.

`protocol.md`, "Rounds" and "Grace window". A roster only shrinks; what has been contributed stays.
"""

from __future__ import annotations

from collections.abc import Callable

from dd_lightning.protocol.actions import Merge
from dd_lightning.protocol.bookings import Bookings
from dd_lightning.protocol.members import Member, median_step
from dd_lightning.protocol.messages import Closed
from dd_lightning.protocol.rounds import Round
from dd_lightning.protocol.run_state import RunState


class Closing:
    """Decides when a round has its quorum, is complete or is cancelled. Loses nothing: what a
    cancelled or missed round did not get stays with its learner."""

    def __init__(self, run: RunState, bookings: Bookings) -> None:
        self.run = run
        self.bookings = bookings
        self.outstanding = 0  # merges handed out and not yet reported
        self.held_merges: list[Merge] = []  # closed while a checkpoint waits
        self.hold = False
        self.held_back: Callable[[Round], bool] = lambda round_: False  # by a cut under way
        self.quorum_times: dict[tuple[int, int], float | None] = {}  # of recent rounds

    def strike_from(self, round_: Round, learner: str, now: float) -> None:
        """One round goes on without that learner."""
        if round_.left.pop(learner, None) is not None:
            self.check(round_, now)

    def strike(self, member: Member, now: float) -> None:
        """The member left `training`: rosters shrink; what it has contributed stays."""
        for round_ in list(self.run.book.open.values()):
            self.strike_from(round_, member.learner, now)

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
                self.close(round_, now)

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
        self.record_cancelled(round_)
        self.bookings.settle_waiting()

    def record_cancelled(self, round_: Round) -> None:
        """To the tape."""
        self.run.record(
            "round_cancelled", epoch=round_.epoch, round=round_.number, fragment=round_.fragment
        )

    def close(self, round_: Round, now: float) -> None:
        """It takes no more; what it holds is merged, now or after the checkpoint that waits. Not
        yet, when a cut under way holds it back."""
        run = self.run
        if self.held_back(round_):
            return
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
