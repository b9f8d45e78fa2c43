"""What the syncer knows of a run, shared by admission, rounds and the end of a run.

No decisions are made here: this is the state, how it is written to a checkpoint, and the few
things that all three need (say, record, book a loss).
"""

from __future__ import annotations

from collections import deque
from typing import Any

from dd_lightning.protocol.accounts import Account, PastLives, element_weighted, ledger_rows
from dd_lightning.protocol.actions import Action, HeldContribution, Record, Send, Warn
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.estimates import GraceEstimator
from dd_lightning.protocol.layout import Layout
from dd_lightning.protocol.members import (
    FINISHING,
    JOINING,
    LOST,
    NOTHING_HELD,
    PAUSED,
    TRAINING,
    Member,
    RunClock,
)
from dd_lightning.protocol.messages import ApplyDone, Message, RoundKey, Version
from dd_lightning.protocol.positions import DataPositions
from dd_lightning.protocol.rounds import RoundBook
from dd_lightning.protocol.vector_clock import VectorClock


class RunState:
    """State of one run on the syncer, in one epoch."""

    def __init__(self, config: SyncerConfig, run_id: str, epoch: int) -> None:
        self.config = config
        self.run_id = run_id
        self.epoch = epoch
        self.layout: Layout | None = None
        self.elements: tuple[int, ...] = ()
        self.versions: list[Version] = []  # of Θ, per fragment
        self.made_by: list[RoundKey] = []  # the round that made that version
        self.contains: list[VectorClock] = []  # learner steps in Θ_p
        self.resumed = False  # an earlier epoch of the run has been
        self.initialized = False
        self.initial_missing: set[int] = set()
        self.initial_from: str | None = None  # learner that hands in version 0
        self.initial_heard_s = 0.0  # when it was asked, or last handed in a fragment
        self.members: dict[str, Member] = {}  # current generation of each learner id
        self.sessions: dict[str, tuple[str, int]] = {}
        self.generations: dict[str, int] = {}
        self.slots: dict[str, int] = {}
        self.positions = DataPositions()
        self.accounts: dict[str, Account] = {}  # by incarnation
        self.past: dict[str, PastLives] = {}  # by learner: accounts that need no row of their own
        self.lost_at: dict[str, float] = {}  # learner id to when its generation ended unplanned
        self.book = RoundBook(config.algorithm.fragments, config.algorithm.sync_every)
        self.clock = RunClock(config.quorum)
        cap = config.algorithm.grace_cap
        self.grace = GraceEstimator(
            config.algorithm.grace_rule,
            config.algorithm.grace_safety,
            config.algorithm.overlap,
            max(2.0, config.algorithm.sync_every / 6) if cap is None else cap,
        )
        self.started = False  # rounds may open
        self.reanchor: set[int] = set()  # fragments whose first merge of this epoch is to come
        self.whole_waits: bool | None = None  # restored from a cut: are its learners all back?
        self.lineage_epoch = 0  # the epoch of the last such restore; what lived on is older
        self.anchors_from: list[int] = []  # per fragment: deltas of earlier n have no anchor here
        self.restored_training: int | None = None  # learners the checkpoint counted as training
        self.early: dict[int, dict[str, HeldContribution]] = {}  # round to unasked contributions
        self.final_inbox: dict[int, dict[str, HeldContribution]] = {}  # fragment to finals
        self.merges = 0
        self._totalled: tuple[int, float] | None = None  # tokens_merged after so many merges
        self.finished_learners: set[str] = set()
        self.ever_joined = False
        self.warned: dict[str, str] = {}  # in the order they were said
        self.refusals = 0
        self.fenced = 0  # messages of ended generations, or of none
        self.actions: deque[Action] = deque()

    # ------------------------------------------------------------------ what all three need

    def say(self, session: str, message: Message) -> None:
        """Send a message without payload."""
        self.actions.append(Send(session, message))

    def record(self, event: str, **fields: Any) -> None:
        """To the tape."""
        self.actions.append(Record(event, fields))

    def record_join(self, member: Member, generation: int, **decided: Any) -> None:
        """The join of a learner that waited for a peer's state, with the time of its arrival: where
        its state came from is known now (cold, if nothing was decided). Once per generation."""
        if member.generation == generation and member.join_row is not None:
            row, member.join_row = member.join_row, None
            self.record("join", **row | decided)

    def record_apply(self, member: Member, generation: int, done: ApplyDone, **more: Any) -> None:
        """An apply, once; `generation`: of the learner when it was done."""
        step, fragment, version = done
        if version <= member.on_tape.get(fragment, NOTHING_HELD):
            return
        member.on_tape[fragment] = version
        self.record(
            "apply",
            learner=member.learner,
            generation=generation,
            step=step,
            epoch=version[0],
            fragment=fragment,
            version=list(version),
            **more,
        )

    def warn_once(self, key: str, text: str) -> None:
        """Tell the operator, once per key."""
        if key not in self.warned:
            self.warned[key] = text
            self.actions.append(Warn(text))
            self.record("warning", text=text)

    def book_loss(self, account: Account, fragment: int, tokens: int, cause: str) -> None:
        """Sink of the accounts: every loss is on the tape."""
        self.record(
            "lost",
            learner=account.learner,
            generation=account.generation,
            fragment=fragment,
            tokens=tokens,
            cause=cause,
        )

    def in_state(self, *states: str) -> list[Member]:
        """Members in one of these states, by learner id."""
        return [m for _, m in sorted(self.members.items()) if m.state in states]

    @property
    def training(self) -> list[Member]:
        """Members that rosters, run clock and quorum look at: those in `training`, and those that
        were when the cut was taken from which the run was restored."""
        return [m for m in self.in_state(TRAINING, JOINING) if m.state == TRAINING or m.resumes]

    @property
    def live(self) -> list[Member]:
        """Members neither gone nor lost."""
        return [m for _, m in sorted(self.members.items()) if m.live]

    def expects_rejoin(self, now: float) -> bool:
        """A lost learner may still come back within `timeouts.rejoin`."""
        return any(
            now < lost + self.config.timeouts.rejoin
            for learner, lost in self.lost_at.items()
            if self.members[learner].state == LOST
        )

    @property
    def handed_in(self) -> set[str]:
        """Learners that have done their last step and hold nothing that Θ lacks."""
        return {m.learner for m in self.in_state(FINISHING) if m.all_done_s is not None}

    def quiet(self, now: float) -> bool:
        """Nobody trains, is paused or joining, and no rejoin is expected."""
        return not self.in_state(TRAINING, PAUSED, JOINING) and not self.expects_rejoin(now)

    @property
    def tokens_merged(self) -> float:
        """Σ_p E_p·merged[p] / ΣE_p over the run."""
        if not self.elements:
            return 0.0
        if self._totalled is not None and self._totalled[0] == self.merges:
            return self._totalled[1]  # asked at every message
        totals = [
            sum(a.merged[p] for a in (*self.accounts.values(), *self.past.values()))
            for p in range(len(self.elements))
        ]
        self._totalled = (self.merges, element_weighted(totals, self.elements))
        return self._totalled[1]

    def ledger(self, learner: str) -> list[dict[str, int]]:
        """The learner's rows, summed over its incarnations."""
        own = [a for a in self.accounts.values() if a.learner == learner]
        past = [self.past[learner]] if learner in self.past else []
        return ledger_rows([*own, *past], len(self.elements))

    def superseded(self, account: Account) -> bool:
        """Whether another process has joined under its id since: it never comes back."""
        return account.generation < self.generations.get(account.learner, 0)

    def fold(self, account: Account) -> None:
        """Close the books of a process that another has followed: one sum a learner is kept."""
        zeros = [0] * account.fragments
        past = self.past.setdefault(account.learner, PastLives(list(zeros), list(zeros)))
        past.add(account)
        del self.accounts[account.incarnation]

    # ------------------------------------------------------------------ checkpoint

    def state(self) -> dict[str, Any]:
        """Plain values; with Θ and the outer optimizer they are the whole syncer."""
        return {
            "epoch": self.epoch,
            "run_id": self.run_id,
            "config": self.config.to_dict(),
            "tensors": [
                [t.name, list(t.shape), t.kind, t.module]
                for t in (self.layout.tensors if self.layout else ())
            ],
            "fingerprint": self.layout.fingerprint if self.layout else "",
            "versions": [list(v) for v in self.versions],
            "contains": [dict(clock) for clock in self.contains],
            "next_round": self.book.next_round,
            "offset": self.book.offset,
            "clock": self.clock.value,
            "merges": self.merges,
            "training": len(self.live) - len(self.handed_in),  # who is to come back
            "generations": dict(self.generations),
            "slots": dict(self.slots),
            "positions": self.positions.state(),
            "accounts": [account.state() for account in self.accounts.values()],
            "past": {learner: past.state() for learner, past in self.past.items()},
            "finished": sorted(self.finished_learners | self.handed_in),
            "reanchor": sorted(self.reanchor),
            "lineage_epoch": self.lineage_epoch,
            "tokens_merged": self.tokens_merged,
        }

    def restore(self, state: dict[str, Any], layout: Layout) -> None:
        """Continue from a checkpoint in this (higher) epoch: rounds open then are skipped, the
        first merge of every fragment is a re-anchor. Lost: the merges after the checkpoint
        (booked as `rollback` where the learner cannot contribute the work again)."""
        if layout.fingerprint != state["fingerprint"]:
            raise ValueError(
                f"the checkpoint's layout is {state['fingerprint']}, the configuration gives "
                f"{layout.fingerprint}: resume with the fragments and fragmentation of the run"
            )
        self.set_layout(layout)
        self.initialized = True
        self.versions = [(self.epoch, n) for _, n in state["versions"]]
        self.made_by = [(self.epoch, 0)] * layout.num_fragments
        self.contains = [VectorClock(counts) for counts in state["contains"]]
        self.book.next_round = state["next_round"]
        self.book.offset = state["offset"]
        self.clock.value = state["clock"]
        self.merges = state["merges"]
        self.generations = dict(state["generations"])
        self.slots = dict(state["slots"])
        self.positions = DataPositions(state.get("positions", ()))  # absent in older ones
        accounts = [Account.restore(row) for row in state["accounts"]]
        self.accounts = {account.incarnation: account for account in accounts}
        past = state.get("past", {})  # absent before accounts were folded
        self.past = {learner: PastLives(**row) for learner, row in past.items()}
        self.finished_learners = set(state["finished"])
        self.reanchor = set(range(layout.num_fragments))
        self.restored_training = max(1, state["training"])
        self.lineage_epoch = state.get("lineage_epoch", 0)  # absent before cuts

    def set_layout(self, layout: Layout) -> None:
        """The layout stands for the whole run."""
        self.layout = layout
        self.elements = layout.elements()
        self.book.fragments = layout.num_fragments
        self.versions = [(self.epoch, 0)] * layout.num_fragments
        self.made_by = [(self.epoch, 0)] * layout.num_fragments
        self.contains = [VectorClock()] * layout.num_fragments
        self.initial_missing = set(range(layout.num_fragments))
        self.record(
            "layout",
            fragments=[list(names) for names in layout.fragments],
            averaged=sorted(layout.averaged),
            elements=list(self.elements),
            fingerprint=layout.fingerprint,
        )
