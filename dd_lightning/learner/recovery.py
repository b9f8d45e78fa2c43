"""A learner's part in transfers of inner state: receiver before its first step, donor later.

Both run in the training thread; the pieces go over the comm thread. What a failure loses: a donor
loses nothing (neither weights nor time), a receiver the state that was on its way, and after the
last donor it begins cold, with a warning.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from dd_lightning.learner.inner_state import InnerState, raw_bytes
from dd_lightning.learner.state_copy import BackgroundCopy, StateCopies
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import (
    DonateState,
    Inner,
    Message,
    StateChunk,
    StateComing,
    StateFailed,
    StateLoaded,
    StateOver,
    StateReceived,
    Welcome,
)
from dd_lightning.protocol.transfer import (
    MOST_DONORS,
    Assembly,
    Entry,
    StateSource,
    TransferError,
)

log = logging.getLogger(__name__)


class InnerExchange:
    """Of one learner, for one stay in the run.

    Args:
        link: reached by `call` only, in the comm thread.
        timeout_s: `timeouts.donor`.
    """

    def __init__(
        self,
        state: InnerState,
        copies: StateCopies,
        link: LearnerLink,
        call: Callable[..., None],
        timeout_s: float,
    ) -> None:
        self.waiting = False  # for a peer's state
        self.donor_step: int | None = None  # of the state that was loaded
        self._state, self._copies = state, copies
        self._link, self._call = link, call
        self._timeout_s = timeout_s
        self._heard_s = self._described_s = 0.0
        self._assembly: Assembly | None = None
        self._refused = 0  # the transfer that was refused last
        self._donating = 0  # the transfer that was begun last
        self._asked: DonateState | None = None  # a copy is to begin at the next boundary
        self._copy: tuple[int, int, dict[str, Entry], BackgroundCopy] | None = None

    # ------------------------------------------------------------------ both

    def begin(self, donated: bool, now: float) -> None:
        """Say what the optimizer is; wait for a state if the syncer said that one comes."""
        self.waiting = donated
        self._heard_s = now
        self._tell(now)

    def welcomed(self, welcome: Welcome) -> None:
        """Under a new generation everything begins anew."""
        self._assembly, self._asked, self._refused = None, None, 0
        self._forget_copy()
        if self.waiting and not welcome.donated:
            self._without("the syncer was started anew")

    def take(self, message: Message, payload: memoryview | None, now: float) -> None:
        """A message about inner state."""
        if isinstance(message, DonateState):
            self._asked = message
        elif isinstance(message, StateComing):
            self._heard_s = now
        elif isinstance(message, StateOver):
            self._over(message)
        elif isinstance(message, StateChunk) and self.waiting and payload is not None:
            self._heard_s = now
            self._receive(message, payload)

    # ------------------------------------------------------------------ receiver

    def tick(self, now: float) -> None:
        """While waiting: repeat the wish, which may have been lost, and give up in the end."""
        if not self.waiting:
            return
        if now >= self._heard_s + (MOST_DONORS + 1) * self._timeout_s:
            reason = f"nothing came for {(MOST_DONORS + 1) * self._timeout_s:g} s"
            self._say(StateFailed(generation=0, transfer=0, reason=reason))
            self._without(reason)
        elif now >= self._described_s + self._timeout_s / 3:
            self._tell(now)

    def _tell(self, now: float) -> None:
        self._described_s = now
        self._call(self._link.describe, Inner(generation=0, optimizer=self._state.description))

    def _receive(self, message: StateChunk, payload: memoryview) -> None:
        number = message.transfer
        if number <= self._refused or (self._assembly and number < self._assembly.transfer):
            return  # of a donor that was given up
        if self._assembly is None or number > self._assembly.transfer:
            self._assembly = self._new_assembly(number)
        try:
            self._assembly.add(message, payload)
            self._use(self._assembly)
        except TransferError as error:
            log.warning("a donated inner state is refused: %s", error)
            self._refused, self._assembly = number, None
            self._say(StateFailed(generation=0, transfer=number, reason=str(error)[:1000]))
            return
        received = StateReceived(generation=0, transfer=number, chunks=self._assembly.chunks)
        self._say(received)
        if self._assembly.complete:
            self.waiting, self.donor_step = False, message.step
            self._say(StateLoaded(generation=0, transfer=number, step=message.step))
            self._assembly = None

    def _new_assembly(self, transfer: int) -> Assembly:
        return Assembly(transfer, self._state.fits())

    def _use(self, assembly: Assembly) -> None:
        """More has come. Raises TransferError for what cannot be used."""
        if assembly.complete:
            self._state.load(assembly.entries)

    def _over(self, message: StateOver) -> None:
        if self._asked is not None and self._asked.transfer == message.transfer:
            self._asked = None
        if self._donating == message.transfer:
            self._forget_copy()
        if self.waiting and message.transfer == 0:
            self._without(message.reason)

    def _without(self, reason: str) -> None:
        self.waiting, self._assembly = False, None
        warnings.warn(f"this learner begins with an empty inner optimizer: {reason}.", stacklevel=3)

    # ------------------------------------------------------------------ donor

    def boundary(self, step: int) -> None:
        """After the applies of a boundary: begin the copy that was asked for."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        try:
            self._donating = asked.transfer
            self._begin_copy(asked, step)
        except TransferError as error:
            failed = StateFailed(generation=0, transfer=asked.transfer, reason=str(error)[:1000])
            self._say(failed)

    def _begin_copy(self, asked: DonateState, step: int) -> None:
        entries = self._state.entries()
        names = {str(number): entry for number, entry in enumerate(entries)}
        copy = self._copies.begin(dict(zip(names, entries.values(), strict=True)))
        self._copy = (asked.transfer, step, names, copy)

    def _forget_copy(self) -> None:
        self._copy = None

    def settled(self) -> None:
        """Copies under way have just been finished: hand a finished one over."""
        if self._copy is None:
            return
        (transfer, step, names, copy), self._copy = self._copy, None
        copied = copy.finish()
        entries = [(entry, raw_bytes(copied[name])) for name, entry in names.items()]
        self._call(self._link.inner.donate, StateSource(transfer, step, entries))

    def _say(self, message: Message) -> None:
        self._call(self._link.say, message)
