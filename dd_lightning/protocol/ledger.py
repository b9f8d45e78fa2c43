"""The learner's ledger: what it holds per fragment, what it owes to rounds, what it applies when.

Owned by the training thread; knows no clock, socket, thread or Lightning. Deliveries go in
(`on_pull`, `on_fragment`, ...), and at every step boundary `boundary()` applies what has arrived,
then answers the pulls. Invariant in all apply modes: odometer − c_tokens = max(mark, end of the
last merged interval), unless a snapshot was merged that the learner has not heard of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from dd_lightning.protocol.apply_writer import ApplyWriter
from dd_lightning.protocol.config import SyncerConfig
from dd_lightning.protocol.held import NOTHING_HELD, Asked, FragmentState, Held, Snapshot, Values
from dd_lightning.protocol.messages import (
    HELD,
    Applied,
    Fragment,
    Nothing,
    Pull,
    RoundKey,
    Welcome,
)
from dd_lightning.protocol.own_schedule import OwnSchedule

Outgoing = Snapshot | Nothing | Applied
"""`Nothing` and `Applied` with generation 0: who sends them fills in the current one."""


@dataclass(slots=True)
class LearnerLedger:
    """See the module. `deltas`: the codec encodes deltas, so anchors are kept.

    `step` counts inner steps over all incarnations that state was carried through.
    """

    values: Values
    num_fragments: int
    sync_every: int
    apply: str = "overwrite"
    mix_alpha: float = 0.0
    wait: str = "never"
    overlap: int = 0
    round_timeout_s: float = 60.0
    deltas: bool = False
    buffers: frozenset[str] = frozenset()
    step: int = 0
    odometer: int = 0
    epoch: int = 0
    finishing: bool = False
    cut: str = ""  # the last consistent cut that this learner has recorded its part of
    _fragments: list[FragmentState] = field(init=False)
    _schedule: OwnSchedule = field(init=False)
    _writer: ApplyWriter = field(init=False)

    def __post_init__(self) -> None:
        self._fragments = [FragmentState() for _ in range(self.num_fragments)]
        self._schedule = OwnSchedule(self.num_fragments, self.sync_every, self.round_timeout_s)
        self._writer = ApplyWriter(
            self.values, self.apply, self.mix_alpha, self.deltas, self.buffers
        )

    @classmethod
    def from_config(
        cls, values: Values, config: SyncerConfig, num_fragments: int, **options: Any
    ) -> LearnerLedger:
        """With the run's settings; `options`: deltas, buffers, step."""
        algorithm = config.algorithm
        return cls(
            values,
            num_fragments,
            algorithm.sync_every,
            algorithm.apply,
            algorithm.mix_alpha,
            algorithm.wait,
            algorithm.overlap,
            config.timeouts.round,
            **options,
        )

    # ------------------------------------------------------------------ what happens

    def attach(self, welcome: Welcome) -> None:
        """Admitted (again): a higher epoch voids what lower ones sent; own clock := C."""
        self._enter(welcome.epoch)
        self._schedule.attach(welcome.clock, self.step, welcome.offset, welcome.next_round)
        for state, merged_upto in zip(self._fragments, welcome.merged_upto, strict=True):
            state.reload = False  # it was promised by a generation that is over: asked for again
            state.settle(merged_upto, self.step, self.odometer)

    def stepped(self, tokens: int) -> None:
        """One inner step really happened, on so many tokens since the previous one."""
        self.step += 1
        self.odometer += tokens
        for state in self._fragments:
            state.steps += 1
            state.tokens += tokens

    def on_fragment(self, message: Fragment, tensors: Mapping[str, Tensor]) -> None:
        """A fragment has arrived; only the newest of each waits for the boundary."""
        if message.version[0] < self.epoch:
            return
        self._enter(message.version[0])
        state = self._fragments[message.fragment]
        state.closed = max(state.closed, message.round)
        if state.arrived is not None and message.version <= state.arrived[0].version:
            return
        if message.version > state.version or state.reload:
            state.arrived = (message, tensors)
        else:
            state.settle(message.merged_upto, self.step, self.odometer)

    def on_pull(self, pull: Pull, now: float) -> None:
        """A pull has arrived; a repeated one keeps the time of the first."""
        if pull.epoch < self.epoch:
            return
        self._enter(pull.epoch)
        state = self._fragments[pull.fragment]
        asked = Asked(pull, now)
        if state.asked is not None:
            if asked.key < state.asked.key:
                return
            if asked.key == state.asked.key:
                asked = Asked(pull, state.asked.arrived_s)
        state.asked = asked

    def on_closed(self, fragment: int, round_: RoundKey) -> None:
        """Rounds of that fragment up to `round_` are closed, without what is not in by now. Nobody
        waits for one any more: a cancelled one makes no fragment, that of another is on its way."""
        state = self._fragments[fragment]
        state.closed = max(state.closed, round_)
        if state.awaited is not None and state.awaited[0] <= round_:
            state.awaited = None

    def on_refused(self, fragment: int, round_: RoundKey) -> None:
        """The snapshot for that round was refused for its values: no merge will ever hold it."""
        self._fragments[fragment].refused(round_)

    def reload(self) -> None:
        """Take Θ as it is, whatever the apply mode: what is held is not to be used any more.

        Whole, at one boundary: of fragments applied one after the other, the first would be ruined
        by the very next step's gradients, through those still to come. Nothing is handed in until
        then; the steps in between are lost (`absent`).
        """
        for state in self._fragments:
            state.reload, state.snapshot, state.asked, state.awaited = True, None, None, None

    def finish(self) -> None:
        """The last inner step is done; from now on boundaries hand in and apply without limits."""
        self.finishing = True
        for state in self._fragments:
            state.awaited = None

    # ------------------------------------------------------------------ what it says

    @property
    def loaded(self) -> bool:
        """Every fragment has been applied once."""
        return all(state.version != NOTHING_HELD for state in self._fragments)

    @property
    def reloading(self) -> bool:
        """Whether Θ is waited for, to be taken as it is."""
        return any(state.reload for state in self._fragments)

    @property
    def has_something_due(self) -> bool:
        """Whether a boundary may change or read values although nothing new has been heard."""
        return self.wait == "overlap" or any(
            state.arrived is not None or state.asked is not None for state in self._fragments
        )

    def held(self, data_position: int = 0) -> Held:
        """What a join states; of one that is reloading, nothing it could build on."""
        keeps = self.loaded and not any(state.reload for state in self._fragments)
        return Held(
            self.step,
            self.odometer,
            tuple(state.version for state in self._fragments) if keeps else (),
            tuple((state.steps, state.tokens) for state in self._fragments),
            data_position,
        )

    def must_wait(self, now: float) -> bool:
        """`wait: overlap`: a snapshot τ steps old whose round has not been applied. Bounded."""
        overdue = [
            state
            for state in self._fragments
            if state.awaited is not None and self.step - state.awaited[1] >= self.overlap
        ]
        if not overdue:
            self._schedule.wait_began_s = None
            return False
        if self._schedule.keep_waiting(now):
            return True
        for state in overdue:
            state.awaited = None
        return False

    @property
    def wait_deadline(self) -> float | None:
        """When the wait under way is given up; None when there is none."""
        return self._schedule.wait_deadline

    def state_dict(self) -> dict[str, Any]:
        """Plain values for the learner's checkpoint; another process goes on from `step` alone."""
        held = self.held()
        return {
            "step": held.step,
            "odometer": held.odometer,
            "epoch": self.epoch,
            "versions": [list(version) for version in held.versions],
            "pending": [list(pair) for pair in held.pending],
        }

    # ------------------------------------------------------------------ boundary, in order

    def boundary(self, now: float, *, unlimited: bool = False) -> list[Outgoing]:
        """Applies, then pulls (oldest round first), within the limits of one boundary.

        2⌈P/H⌉ of each: at ⌈P/H⌉ snapshots a learner 18% slower than the leader, whom the rounds
        follow, could never answer every pull at P = H. `unlimited`: at the start of a pause, where
        no step waits for the copies.
        """
        per_boundary = -(-self.num_fragments // self.sync_every)
        free = unlimited or self.finishing or not self.loaded
        if self.reloading:
            whole = all(state.arrived or not state.reload for state in self._fragments)
            return self._apply_arrived(None) if whole else []
        out = self._apply_arrived(None if free or self.wait == "overlap" else 2 * per_boundary)
        out += self._take_unasked()
        out += self._answer_pulls(now, None if free else 2 * per_boundary)
        return out

    def _apply_arrived(self, limit: int | None) -> list[Outgoing]:
        ready = [
            (state.arrived[0].round, index)
            for index, state in enumerate(self._fragments)
            if state.arrived is not None and self._may_apply(state, state.arrived[0])
        ]
        return [self._apply(index) for _, index in sorted(ready)[:limit]]

    def _may_apply(self, state: FragmentState, message: Fragment) -> bool:
        snapshot = state.snapshot
        if snapshot is not None and snapshot.final and message.merged_upto != snapshot.round:
            return False  # it would overwrite what was handed in before that is merged
        if state.awaited is not None and message.round >= state.awaited[0]:
            return self.step - state.awaited[1] >= self.overlap
        return True

    def _apply(self, index: int) -> Applied:
        state = self._fragments[index]
        assert state.arrived is not None
        message, arrived = state.arrived
        state.arrived = None
        state.settle(message.merged_upto, self.step, self.odometer)
        before, settled = state.tokens, state.settled
        self._writer.write(index, state, arrived, self.finishing)
        state.version, state.settled, state.reload = message.version, None, False
        if state.snapshot is not None and state.snapshot.round <= message.round:
            state.snapshot = None  # its round closed without it
        if state.awaited is not None and state.awaited[0] <= message.round:
            state.awaited = None
        self._schedule.patient = True
        return Applied(
            generation=0,
            step=self.step,
            fragment=index,
            version=state.version,
            odometer=self.odometer,
            steps=state.steps,
            tokens=state.tokens,
            tokens_before=before,
            settled=settled,
            cut=self.cut,
        )

    def _take_unasked(self) -> list[Outgoing]:
        """Snapshots at this learner's own step of each round, `wait: overlap`."""
        out: list[Outgoing] = []
        if self.wait != "overlap" or not self.loaded:
            return out
        for number in self._schedule.due(self.step):
            index = (number - 1) % self.num_fragments
            key, state = (self.epoch, number), self._fragments[index]
            if state.snapshot is not None:
                # of this round (we re-attached): again. Of an older one: only the pull, which
                # carries merged_upto, tells whether it was merged
                if state.snapshot.round == key:
                    out.append(state.snapshot)
            elif state.closed < key and state.holds_work:
                out.append(self._snapshot(index, key, unasked=True))
                state.awaited = (key, self.step)
                if state.asked is not None and state.asked.key == key:
                    state.asked = None
        return out

    def _answer_pulls(self, now: float, limit: int | None) -> list[Outgoing]:
        """Answers to the pulls that can be answered now; `limit` counts new snapshots."""
        out: list[Outgoing] = []
        taken = 0
        asked = [(s.asked.key, i) for i, s in enumerate(self._fragments) if s.asked is not None]
        for key, index in sorted(asked):
            state = self._fragments[index]
            question = state.asked
            assert question is not None
            pull = question.pull
            state.settle(pull.merged_upto, self.step, self.odometer)
            if state.pull_is_void(question):
                state.asked = None
            elif state.snapshot is not None and state.snapshot.round == key:
                state.asked = None
                out.append(state.snapshot_again(pull))
            elif pull.final and state.may_be_merged(key):
                # asked before its round opened, while a snapshot (unasked) is on its way to an
                # earlier one: a new one would take its place. That one again, and then we wait
                assert state.snapshot is not None
                if not question.put_off:
                    state.asked = replace(question, put_off=True)
                    out.append(state.snapshot)
            elif pull.final and not state.holds_work:
                state.asked, state.handed_in = None, True
                out.append(self._nothing(pull))
            elif self._is_ready(state, pull) and (limit is None or taken < limit):
                taken += 1
                state.asked, state.handed_in = None, self.finishing
                waited = now - question.arrived_s
                as_values = pull.values or pull.base != state.version
                out.append(
                    self._snapshot(index, key, waited, final=pull.final, as_values=as_values)
                )
        return out

    def _is_ready(self, state: FragmentState, pull: Pull) -> bool:
        # a final that came too late holds back every apply since: asked again, it is handed in
        # as it stands
        handed_in = pull.final and state.snapshot is not None and state.snapshot.final
        base_applied = pull.base in (HELD, state.version) or handed_in
        left_for_own_step = (
            self.wait == "overlap" and not self.finishing and self._schedule.is_to_come(pull.round)
        )
        return base_applied and state.holds_work and not left_for_own_step

    # ------------------------------------------------------------------ pieces

    def _nothing(self, pull: Pull) -> Nothing:
        return Nothing(
            generation=0,
            epoch=pull.epoch,
            round=pull.round,
            fragment=pull.fragment,
            odometer=self.odometer,
        )

    def _snapshot(
        self,
        index: int,
        key: RoundKey,
        boundary_wait_s: float = 0.0,
        *,
        final: bool = False,
        unasked: bool = False,
        as_values: bool = False,
    ) -> Snapshot:
        state = self._fragments[index]
        values = self.values.read(index)
        # a base of an earlier epoch is taken as values only
        as_delta = self.deltas and not as_values and state.version[0] == self.epoch
        state.snapshot = Snapshot(
            fragment=index,
            round=key,
            step=self.step,
            steps=state.steps,
            tokens=state.tokens,
            odometer=self.odometer,
            base=state.version,
            values=values,
            anchor=state.anchor if as_delta else None,
            reference=values,
            boundary_wait_s=boundary_wait_s,
            final=final,
            unasked=unasked,
            cut=self.cut,
        )
        return state.snapshot

    def _enter(self, epoch: int) -> None:
        """On learning of a higher epoch, what lower ones sent and is not applied yet is dropped."""
        if epoch > self.epoch:
            self.epoch = epoch
            for state in self._fragments:
                state.enter_epoch(epoch)
