"""A group's stay in a run: rank 0 has the session, the others do as it does.

What a step boundary costs a group: one all-reduce of four integers, in which the ranks' tokens are
summed and rank 0 says whether anything is due; only then do orders follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from dd_lightning.learner.cut_orders import CutOrders
from dd_lightning.learner.group import Group, Op, Order
from dd_lightning.learner.group_inner import GroupInnerState
from dd_lightning.learner.group_recovery import GroupExchange
from dd_lightning.learner.group_values import GroupValues
from dd_lightning.learner.inner_state import InnerState
from dd_lightning.learner.own_checkpoint import RNG_OF_RANKS
from dd_lightning.learner.rng import packed, rng_states, unpacked
from dd_lightning.learner.session import LearnerSession
from dd_lightning.learner.state_copy import StateCopies
from dd_lightning.learner.step_clock import StepClock
from dd_lightning.learner.traffic import Traffic
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.messages import Message, Welcome

FINISH, RESET, CUT_ORDERED, CUT_DUE = 1, 2, 4, 8  # flags at the end of a section


class LeadingSession(LearnerSession):
    """Of rank 0. Whatever touches the module's values happens in a section of the group.

    Args:
        group: the learner's ranks.
    """

    _exchange_of = GroupExchange

    def __init__(self, *arguments: Any, group: Group) -> None:
        super().__init__(*arguments)
        self._group = group
        self.weights.section = lambda: group.section(self._result)
        self._cut_is_due = False
        self._quiet = False  # nothing is due: the others do not listen, so nothing is taken in

    def open(self) -> None:
        """As of one process, on every rank."""
        with self._group.section(self._result):
            super().open()

    def load(self) -> None:
        """As of one process, on every rank."""
        with self._group.section(self._result):
            super().load()

    def exchange(self, state: InnerState) -> int | None:
        """As of one process; what a peer gives goes to every rank as it comes."""
        with self._group.section(self._result):
            return super().exchange(state)

    def step(self, tokens: int, loss: float | None) -> None:
        """As of one process, with the tokens of all ranks; the loss is rank 0's."""
        begun = self.now()
        agreed = self._group.agree(tokens, True, self._something_is_due)
        agreed_s = self.now() - begun
        if agreed.is_busy:
            with self._group.section(self._result):
                super().step(agreed.tokens, loss)
        else:
            self._quiet = True
            super().step(agreed.tokens, loss)
            self._quiet = False
        assert self.boundary_s is not None  # there has just been one
        self.boundary_s += agreed_s

    def poll(self) -> None:
        """As of one process."""
        if self._group.agree(0, False, self._something_is_due).is_busy:
            with self._group.section(self._result):
                super().poll()

    def pause(self) -> None:
        """As of one process."""
        with self._group.section(self._result):
            super().pause()

    def finish(self, reason: str = "done") -> None:
        """As of one process; the others wait and apply what comes."""
        with self._group.section(self._result):
            super().finish(reason)

    def state(self) -> dict[str, Any]:
        """As of one process, with the random states of the other ranks; each calls it."""
        found = self._group.collect(b"")[1:]
        return {**super().state(), RNG_OF_RANKS: [unpacked(data) for data in found]}

    @property
    def cut_is_due(self) -> bool:
        """As every rank knows it, from the last section on."""
        return self._cut_is_due

    def record_cut(self) -> dict[str, Any]:
        """As of one process; every rank calls it."""
        with self._group.section(self._result):
            part = super().record_cut()
            name = part["id"].encode()
            self._group.order(Op.CUT, len(name))
            self._group.send_bytes(name)
        return part

    @property
    def _something_is_due(self) -> bool:
        assert self._ledger is not None
        gives = isinstance(self._inner, GroupExchange) and self._inner.has_work
        asked = gives or self.cuts.order is not None
        return asked or self._comm.has_news or self._ledger.has_something_due

    def _welcomed(self, welcome: Welcome) -> None:
        if self._ledger is None:  # the others know no fragments yet, which may be read at once
            data = msgspec.msgpack.encode(welcome)
            self._group.order(Op.WELCOME, len(data))
            self._group.send_bytes(data)
        super()._welcomed(welcome)

    def _drain(self) -> None:
        if not self._quiet:
            super()._drain()

    def _result(self) -> tuple[int, int]:
        flags = (FINISH if self.finish_reason else 0) | (RESET if self.reset_inner else 0)
        self.cuts.all_know, self._cut_is_due = self.cuts.order is not None, super().cut_is_due
        flags |= CUT_ORDERED if self.cuts.all_know else 0
        flags |= CUT_DUE if self._cut_is_due else 0
        return flags, self.steps


@dataclass(frozen=True, slots=True)
class FollowingWeights:
    """What `GlobalWeights` is to the other ranks: `swap` does as rank 0's does."""

    swap: Callable[[], None]


class FollowingSession:
    """Of the other ranks: no syncer, no ledger; its face is the session's."""

    def __init__(
        self,
        values: GroupValues,
        group: Group,
        now: Callable[[], float],
        data_position: int,
    ) -> None:
        self.cuts = CutOrders(_say_nothing)
        self.traffic = Traffic()  # rank 0 has it
        self.weights = FollowingWeights(self._follow)
        self.clock, self.copies = StepClock(), StateCopies()
        self.config = SyncerConfig()
        self.welcome: Welcome | None = None
        self.finish_reason = ""
        self.boundary_s: float | None = None
        self.data_position = data_position
        self.reset_inner = False
        self.steps = 0  # inner steps of the schedule that are done
        self.now = now
        self.cut_is_due = False
        self._cut = ""  # recorded last
        self._values, self._group = values, group
        self._inner: GroupInnerState | None = None

    def open(self) -> None:
        """Until rank 0 is admitted; raises what it raises."""
        self._follow()

    def load(self) -> None:
        """Take over Θ with rank 0."""
        self._follow()

    def exchange(self, state: InnerState) -> None:
        """Take over a peer's inner state if rank 0 gets one."""
        assert isinstance(state, GroupInnerState)  # of a rank
        self._inner = state
        self._follow()

    @property
    def is_alone(self) -> bool:
        """One planned learner."""
        return self.config.learners == 1

    def step(self, tokens: int, loss: float | None) -> None:
        """Count, and do what rank 0 does."""
        begun = self.now()
        self._boundary(tokens, True)
        self.clock.end(self.now())
        self.boundary_s = self.now() - begun

    def poll(self) -> None:
        """After a step that did not count."""
        self._boundary(0, False)

    def before_step(self) -> None:
        """The parameters change next: copies of them that are under way are finished first."""
        self.copies.settle()

    def begin_epoch(self) -> None:
        """Rank 0 warns."""

    def pause(self) -> None:
        """Validation begins."""
        self.clock.leave_out(self.now())
        self._follow()

    def resume(self) -> None:
        """Validation is over."""
        self.clock.resume(self.now())

    def finish(self, reason: str = "done") -> None:
        """Apply what still comes until rank 0 is released."""
        self._follow()

    def close(self, reason: str) -> None:
        """Nothing to leave."""

    def state(self) -> None:
        """Of this rank rank 0 needs the random states only."""
        self._group.collect(packed(rng_states()))

    def record_cut(self) -> dict[str, Any]:
        """Its id; rank 0 has the record."""
        self._follow()
        return {"id": self._cut}

    def checkpointed(self) -> None:
        """Rank 0 says it."""

    def _boundary(self, tokens: int, has_stepped: bool) -> None:
        agreed = self._group.agree(tokens, has_stepped)
        self.steps += has_stepped
        if agreed.is_busy:
            self._follow()

    def _follow(self) -> None:
        flags, self.steps, _ = self._group.follow(self._obey).numbers
        if flags & FINISH:
            self.finish_reason = "rank 0 was told to finish"
        self.reset_inner |= bool(flags & RESET)
        self.cuts.all_know, self.cut_is_due = bool(flags & CUT_ORDERED), bool(flags & CUT_DUE)

    def _obey(self, order: Order) -> None:
        if order.op == Op.WELCOME:
            data = self._group.receive_bytes(order.numbers[0])
            self.welcome = msgspec.msgpack.decode(data, type=Welcome)
            self.config = SyncerConfig.load(self.welcome.config)
            self._values.place(self.welcome.fragments)
        elif order.op == Op.CUT:
            self._cut = self._group.receive_bytes(order.numbers[0]).decode()
        elif order.op == Op.INNER:
            assert self._inner is not None  # ordered from `exchange` on
            self._inner.follow(order, self.copies)
        else:
            if order.op == Op.WRITE:
                self.copies.settle()
            self._values.follow(order)


def _say_nothing(message: Message) -> None:
    raise AssertionError(f"rank 0 alone talks to the syncer, not of {type(message).__name__}")
