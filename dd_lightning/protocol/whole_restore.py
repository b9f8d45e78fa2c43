"""A run restored as a whole from a consistent cut: the same state, under a new epoch.

Versions and rounds keep their numbers, the outer momentum stays, nothing is re-anchored, and the
rounds that were open in the cut are open again. They close, and new ones open, once every learner
of the cut is back with its part, or `timeouts.reanchor` after the first join: what a learner held
that did not come is lost (`dead`). One that lived on beside the restore takes Θ as it is, and what
it did since is lost (`rollback`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dd_lightning.protocol.conductor import Conductor
from dd_lightning.protocol.members import Member
from dd_lightning.protocol.messages import Join, RoundKey
from dd_lightning.protocol.rounds import Asked, Round
from dd_lightning.protocol.run_state import RunState


class WholeRestore:
    """Takes the learners of a cut back.

    Args:
        run: restored from the state of the cut.
        state: what `Cuts` put into the syncer's record, `state["cut"]` among it.
    """

    def __init__(self, run: RunState, conductor: Conductor, state: Mapping[str, Any]) -> None:
        record = state["cut"]
        self.run = run
        self.conductor = conductor
        self.cut: str = record["id"]
        self.began_s: float | None = None  # when the first learner joined
        self._epoch: int = state["epoch"]
        self._rows: dict[str, dict[str, Any]] = record["learners"]
        self._open: list[int] = record["open"]
        self._back: dict[str, str] = {}  # learner to the incarnation that carries its part on
        self._awaited = set(self._rows)
        run.reanchor = set(state["reanchor"])
        run.made_by = [self._moved(key) for key in record["made_by"]]
        for account in run.accounts.values():
            account.merged_upto = [key and self._moved(key) for key in account.merged_upto]
        run.anchors_from = [n for _, n in run.versions]
        run.lineage_epoch = run.epoch
        run.whole_waits = True

    def _moved(self, key: Any) -> RoundKey:
        return (self.run.epoch if key[0] == self._epoch else key[0], key[1])

    # ------------------------------------------------------------------ who joins

    def row_of(self, join: Join) -> dict[str, Any] | None:
        """The record of the part that this join carries on; None when it carries none."""
        row = self._rows.get(join.learner)
        if row is None or join.cut != self.cut or join.former != row["incarnation"]:
            return None
        if (join.step, join.odometer) != (row["step"], row["odometer"]):
            return None
        again = self._back.get(join.learner) == join.incarnation  # it did not hear the answer
        return row if again or join.learner in self._awaited else None

    def begin(self, now: float) -> None:
        """Somebody joins: from now on the others are waited for."""
        if self.began_s is not None:
            return
        self.began_s = now
        run = self.run
        for number in self._open:
            fragment = run.book.fragment_of(number)
            round_ = Round(
                run.epoch,
                number,
                fragment,
                now,
                run.config.quorum,
                reanchor=fragment in run.reanchor,
                degrade=run.config.algorithm.on_lost_quorum == "degrade",
                awaiting=set(self._awaited),
            )
            run.book.reopen(round_)
            run.record(
                "round_open",
                epoch=run.epoch,
                round=number,
                fragment=fragment,
                roster=sorted(self._awaited),
                quorum=min(run.config.quorum, max(1, len(self._awaited))),
            )

    def take_back(self, member: Member, row: Mapping[str, Any]) -> None:
        """Its part stands: what it holds, and what it had applied that was not booked yet."""
        run, join = self.run, member.join
        member.versions = [self._moved(version) for version in join.versions]
        member.clock_base = row["clock_base"]
        member.resumes = True
        member.held_pull, member.withheld = set(row["held_pull"]), set(row["withheld"])
        member.account.saw(join.odometer)
        for fragment, (_, tokens) in enumerate(join.pending):
            self.conductor.bookings.states(member, fragment, join.odometer, tokens)
            if member.versions[fragment] < run.versions[fragment]:
                member.outbox.offer(fragment)
        self._back[join.learner] = join.incarnation

    def joined(self, member: Member, now: float) -> None:
        """A learner of the cut was welcomed: with its part, or as another process."""
        carries_on = self._back.get(member.learner) == member.join.incarnation
        for round_ in list(self.run.book.open.values()):
            if member.learner not in round_.awaiting:
                continue
            round_.awaiting.discard(member.learner)
            if carries_on:
                round_.roster += (member.learner,)
                round_.left[member.learner] = Asked(member.generation, round_.opened_s, now)
                self.run.say(member.session, self.conductor.intake.pull(member, round_))
            self.conductor.closing.check(round_, now)
        self._awaited.discard(member.learner)
        self.run.whole_waits = bool(self._awaited)
        self.conductor.bookings.settle_waiting()

    # ------------------------------------------------------------------ time

    @property
    def deadline(self) -> float | None:
        """When the learners that are still missing are given up."""
        if not self._awaited or self.began_s is None:
            return None
        return self.began_s + self.run.config.timeouts.reanchor

    def tick(self, now: float) -> None:
        """Strike who has not come."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return
        missing = ", ".join(sorted(self._awaited))
        self.run.warn_once(
            "whole",
            f"learner {missing} of cut {self.cut} did not come back within timeouts.reanchor: "
            "the run goes on without, and what it held is lost",
        )
        self._awaited.clear()
        self.run.whole_waits = False
        for round_ in list(self.run.book.open.values()):
            round_.awaiting.clear()
            self.conductor.closing.check(round_, now)
