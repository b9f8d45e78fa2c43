"""What is booked when a learner applies, when an incarnation ends, when a fragment arrives."""

from __future__ import annotations

from dd_lightning.protocol.members import Member
from dd_lightning.protocol.messages import Applied
from dd_lightning.protocol.run_state import RunState


class Bookings:
    """Losses are booked after any round open at that moment has closed, never before."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.deliveries: dict[int, tuple[int, float, int]] = {}  # fragment: n, closed_s, received
        self.waiting_applies: list[tuple[Member, Applied]] = []

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
