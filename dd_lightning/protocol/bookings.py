"""What is booked when a learner applies, when an incarnation ends, when a fragment arrives."""

from __future__ import annotations

from collections.abc import Callable

from dd_lightning.protocol.members import Member
from dd_lightning.protocol.messages import Applied
from dd_lightning.protocol.run_state import RunState


class Bookings:
    """Losses are booked after any round open at that moment has closed, never before."""

    def __init__(self, run: RunState) -> None:
        self.run = run
        self.deliveries: dict[int, tuple[int, float, int]] = {}  # fragment: n, closed_s, received
        # (incarnation, p, settled) to the learner and the cut it had recorded before
        self.waiting_applies: dict[tuple[str, int, int], tuple[Member, str]] = {}
        self.put_off: Callable[[str], bool] = lambda cut: False  # while that cut is under way

    def applied(self, member: Member, message: Applied) -> None:
        """The learner applied a fragment: what it overwrote is lost, once any round that holds a
        contribution of it has closed (the contribution may yet be merged)."""
        run = self.run
        if not 0 <= message.fragment < len(run.versions):
            return
        if message.version > member.versions[message.fragment]:
            member.versions[message.fragment] = message.version
            member.held_pull.discard(message.fragment)
            done = (message.step, message.fragment, message.version)
            run.record_apply(member, member.generation, done)
        self.states(member, message.fragment, message.odometer, message.tokens, message.cut)
        self.settle_waiting()

    def states(
        self, member: Member, fragment: int, odometer: int, tokens: int, cut: str = ""
    ) -> None:
        """The learner holds so many tokens of the fragment: all before them is settled."""
        account, settled = member.account, odometer - tokens
        account.saw(odometer)
        if settled > account.settled(fragment):
            self.waiting_applies[account.incarnation, fragment, settled] = (member, cut)

    def settle_waiting(self) -> None:
        """Book what waited for a round to close, then the ends of incarnations."""
        run = self.run
        busy = {round_.fragment for round_ in run.book.all()}
        cause = "mixed" if run.config.algorithm.apply == "mix" else ""
        waiting = list(self.waiting_applies.items())
        for (incarnation, fragment, settled), (member, cut) in waiting:
            # roster or not, a contribution may still come while a round of it is open
            if fragment not in busy and not self.put_off(cut):
                member.account.advance(fragment, settled, cause, run.book_loss)
                del self.waiting_applies[incarnation, fragment, settled]
        unbooked = {incarnation for incarnation, _, _ in self.waiting_applies}
        held = [held for round_ in run.book.all() for held in round_.ordered()]
        for inbox in run.final_inbox.values():  # handed in: the next round of it merges them
            held += inbox.values()
        unbooked |= {contribution.incarnation for contribution in held}
        for account in list(run.accounts.values()):
            if account.ended and account.incarnation not in unbooked:
                if not account.closed:
                    account.close(run.book_loss)
                if run.superseded(account):
                    run.fold(account)

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
