"""What a session under replay hears: the syncer's messages in the order and at the steps of the
tape, with values as the replay has computed them. Where one is not known yet, the learner parks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from dd_lightning.learner.comm import Delivery
from dd_lightning.learner.traffic import Traffic
from dd_lightning.protocol.held import Snapshot
from dd_lightning.protocol.messages import (
    Applied,
    FinishNow,
    Fragment,
    Pull,
    Released,
    RoundKey,
    StateChunk,
    StateOver,
    TensorInfo,
    Version,
    Welcome,
)
from dd_lightning.protocol.transfer import StateSource
from dd_lightning.simulate.replay_script import ApplyAt, Attach, Differs, Given, LifeScript

ALL_CHUNKS = 1 << 62


class Answers(Protocol):
    """What the syncer would say; None: the replay has not come so far."""

    def welcome(
        self, script: LifeScript, attach: Attach, tensors: tuple[TensorInfo, ...]
    ) -> Welcome | None:
        """The answer to a join."""
        ...

    def fragment(
        self, script: LifeScript, apply: ApplyAt
    ) -> tuple[Fragment, Mapping[str, Any]] | None:
        """The version that an apply took over, with its tensors."""
        ...

    def pull(self, script: LifeScript, given: Given) -> Pull:
        """The question that a contribution answered."""
        ...

    def made_by(self, fragment: int, version: Version) -> RoundKey:
        """The round that a version is of."""
        ...

    def state(self, script: LifeScript) -> StateSource | None:
        """The inner state that the life was donated; None: it went without."""
        ...


class ReplayComm:
    """What the comm thread is to a session. Nothing waits here but for what the replay computes.

    Args:
        park: gives the turn back to the replay until it has gone on.
    """

    def __init__(
        self,
        script: LifeScript,
        answers: Answers,
        tensors: tuple[TensorInfo, ...],
        codec: Any,
        park: Callable[[], None],
    ) -> None:
        self._script, self._answers, self._tensors = script, answers, tensors
        self._codec, self._park = codec, park
        self._now = 0.0
        self.traffic = Traffic()
        self.snapshots: dict[RoundKey, Snapshot] = {}  # taken for merges to come
        self.initial: dict[int, Mapping[str, Any]] = {}
        self.step = script.first.step  # inner steps done, as far as the session has said
        self._coming = script.first.step  # whose boundary comes next
        self._attaches = list(script.attaches)
        self._applies = list(script.applies)
        self._pulls = sorted(script.given, key=lambda given: given.step)
        # what is still to be done of each epoch: a syncer's word ends with it
        self._open = Counter(apply.version[0] for apply in self._applies)
        self._open.update(given.key[0] for given in self._pulls)
        self._asked = {given.key for given in self._pulls}
        self._steps = {(apply.fragment, apply.version): apply.step for apply in self._applies}
        self._awaits_state = script.waits_for_state
        self._source: StateSource | None = None
        self._described = self._told_to_finish = self._finishing = self._released = False
        self._blocked = False  # the next message is not known yet

    # ------------------------------------------------------------------ what a session calls

    def clock(self) -> float:
        """Moves only where the session waits in vain."""
        return self._now

    @property
    def wants_deltas(self) -> bool:
        """Whether the run's codec encodes deltas."""
        return self._codec.encodes == "delta"

    def start(self) -> None:
        """Nothing to connect."""

    def check(self) -> None:
        """Nothing goes wrong in here."""

    def stop(self, timeout_s: float) -> bool:
        """Nothing to end."""
        del timeout_s
        return True

    def call(self, command: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """What the session tells the link: snapshots and values are kept, the rest is known."""
        del options
        name = command.__name__
        if name == "contribute":
            self._contributed(arguments[0])
        elif name == "say" and isinstance(arguments[0], Applied):
            self._applied(arguments[0])
        elif name == "initial":
            self.initial[arguments[0]] = arguments[1]
        elif name == "report":
            self.step = arguments[0].step
        elif name == "describe":
            self._described = True
        elif name == "finish":
            self._finishing = True

    def next(self, timeout_s: float) -> Delivery | None:
        """The next message of the script for this boundary."""
        while True:
            self._blocked = False
            message = self._due()
            if message is not None:
                return message
            if timeout_s <= 0:
                return None
            if not self._blocked and not self._finishing:
                self._now += timeout_s
                return None
            self._park()

    # ------------------------------------------------------------------ the script

    def step_comes(self) -> None:
        """The boundary of the next step comes next. Raises Differs where one has been left out."""
        if self._applies and self._applies[0].step <= self.step:
            late = self._applies[0]
            raise Differs(
                f"version {list(late.version)} was applied after step {late.step} on the tape, but "
                "it is not merged by then",
                self._answers.made_by(late.fragment, late.version),
                late.fragment,
                self._script.learner,
            )
        self._coming = self.step + 1

    def _due(self) -> Delivery | None:
        return self._attach() or self._apply() or self._state() or self._pull() or self._end()

    def _attach(self) -> Delivery | None:
        """A join's answer comes after the boundary that the join spoke of, and when all that
        earlier epochs brought about is done: with it, what they had sent and asked besides is
        dropped."""
        if not self._attaches:
            return None
        attach = self._attaches[0]
        if self.step < attach.said or self._coming < attach.step:
            return None
        if any(count for epoch, count in self._open.items() if epoch < attach.epoch):
            return None
        welcome = self._answers.welcome(self._script, attach, self._tensors)
        if welcome is None:
            self._blocked = True
            return None
        del self._attaches[0]
        return self._deliver(welcome)

    def _apply(self) -> Delivery | None:
        for index, apply in enumerate(self._applies):
            if apply.step > self._coming:
                break
            if self._attaches and apply.version[0] > self._epoch:
                continue
            found = self._answers.fragment(self._script, apply)
            if found is None:
                self._blocked = True
                continue
            del self._applies[index]
            return self._deliver(*found)
        return None

    def _state(self) -> Delivery | None:
        """A peer's inner state, or word that none comes, after all that was applied meanwhile."""
        if not self._awaits_state or not self._described or self._blocked:
            return None
        if self._source is None:
            self._source = self._answers.state(self._script)
            if self._source is None:
                self._awaits_state = False
                return self._deliver(StateOver(generation=0, transfer=0, reason="as on the tape"))
            self._source.allow(ALL_CHUNKS)
        chunk, data = self._source.take()
        self._awaits_state = not self._source.over
        return self._deliver(chunk, payload=data)

    def _pull(self) -> Delivery | None:
        for index, given in enumerate(self._pulls):
            if given.step > self._coming:
                break
            if given.final and not self._finishing:
                continue
            if self._attaches and given.key[0] > self._epoch:
                continue
            del self._pulls[index]
            return self._deliver(self._answers.pull(self._script, given))
        return None

    def _end(self) -> Delivery | None:
        finish_at = self._script.told_to_finish_at
        if finish_at is not None and finish_at <= self._coming and not self._told_to_finish:
            self._told_to_finish = True
            return self._deliver(FinishNow(generation=0, reason="as on the tape"))
        if self._finishing and not self._pulls and not self._released:
            self._released = True
            return self._deliver(Released(generation=0))
        return None

    @property
    def _epoch(self) -> int:
        """Of the syncer that has answered last, while another answer is to come."""
        taken = len(self._script.attaches) - len(self._attaches)
        return self._script.attaches[max(0, taken - 1)].epoch

    def _contributed(self, snapshot: Snapshot) -> None:
        if snapshot.round in self._asked:
            self._asked.remove(snapshot.round)
            self._open[snapshot.round[0]] -= 1
            self.snapshots[snapshot.round] = snapshot

    def _applied(self, applied: Applied) -> None:
        """Compared with the tape: this is what makes the next step's parameters."""
        step = self._steps.pop((applied.fragment, applied.version), None)
        self._open[applied.version[0]] -= 1
        if step != applied.step:
            raise Differs(
                f"version {list(applied.version)} was applied after step {applied.step} instead of "
                f"{step}",
                self._answers.made_by(applied.fragment, applied.version),
                applied.fragment,
                self._script.learner,
            )

    def _deliver(
        self, message: Any, tensors: Mapping[str, Any] | None = None, payload: Any = None
    ) -> Delivery:
        assert not isinstance(message, StateChunk) or payload is not None  # raw bytes beside it
        if isinstance(message, Fragment) and tensors is not None:
            self.traffic.came(message, tensors, message.payload.num_bytes)
        return Delivery(message, tensors, self._now, payload)
