"""The learner's side of the session with the syncer, without sockets, clock or threads.

Joins, reconnects, heartbeats, coalesced progress, the upload queue and the fencing of generations
and epochs. Its driver (the comm thread, or a simulator) feeds events, carries out `take()` in
order, and asks `next_upload()` whenever the data channel takes a contribution.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from dd_lightning.protocol.config import SyncerConfig, Timeouts
from dd_lightning.protocol.held import Held, Snapshot
from dd_lightning.protocol.id_wait import IdWait
from dd_lightning.protocol.inner_link import InnerLink
from dd_lightning.protocol.joining import join_of, settle_cut
from dd_lightning.protocol.link_actions import (
    HANDED_ON,
    Deliver,
    Fail,
    InitialValues,
    LinkAction,
    Reconnect,
    Send,
    Upload,
    stamped,
)
from dd_lightning.protocol.messages import (
    Applied,
    Closed,
    Contribution,
    DonateState,
    Finish,
    Fragment,
    Goodbye,
    Initial,
    Inner,
    Join,
    Message,
    Payload,
    Pong,
    Pull,
    Received,
    Refused,
    Rejoin,
    Released,
    RoundKey,
    StateOver,
    Verdict,
    Welcome,
)
from dd_lightning.protocol.progress import ProgressReport
from dd_lightning.protocol.unheard import UnheardApplies

OFFLINE, JOINING, ATTACHED, ENDED = "offline", "joining", "attached", "ended"


class LearnerLink:
    """One learner process's link, over all its connections.

    Args:
        join: what does not change from join to join; number, generation and what is held are
            filled in.
        address: of the syncer, for messages.
        connect_timeout_s: bound on the first connection, and on each first fragment after it.
        via: the address this learner must be seen at (that of its proxy), "" for any.
    """

    def __init__(
        self,
        join: Join,
        *,
        now: float,
        address: str = "",
        connect_timeout_s: float = 60.0,
        via: str = "",
    ) -> None:
        self.phase = OFFLINE
        self.generation = 0
        self.epoch = 0
        self.run_id = join.run_id
        self.fingerprint = ""
        self.timeouts = Timeouts()
        self.attempts = 0
        self.last_error = ""
        self.progress = ProgressReport()
        self.inner = InnerLink(join.wants_state)
        self.unheard = UnheardApplies()
        self._template = join
        self._held = Held(join.step, join.odometer, join.versions, join.pending)
        self._number = 0
        self._address, self._via = address, via
        self._started_s, self._connect_timeout_s = now, connect_timeout_s
        self._connect_by: float | None = now + connect_timeout_s  # None: all have come
        self._missing: set[int] | None = None  # fragments that have not arrived once
        self._join_sent_s = self._heard_s = now
        self._id_wait = IdWait()
        self._finish: Finish | None = None
        self._uploads: deque[Upload] = deque()
        self._actions: list[LinkAction] = []

    # ------------------------------------------------------------------ from the channel

    def connected(self, now: float) -> None:
        """A channel stands."""
        self._heard_s = now
        if self.phase != ENDED:
            self._join(now)

    def connection_failed(self, cause: str, now: float) -> None:
        """An attempt at a channel (rendezvous included) came to nothing."""
        self.attempts += 1
        self.last_error = cause
        self.tick(now)

    def kept_out(self, cause: str, now: float) -> None:
        """The syncer let this learner's key not in. That ends a first attempt at once; one that was
        in before goes on training and trying: this answer carries no proof of who gave it."""
        if self.generation == 0:
            self._fail(f"could not join at {self._address}: {cause}")
        else:
            self.connection_failed(cause, now)

    def disconnected(self, now: float, cause: str = "connection closed") -> None:
        """The channel is gone; what was queued is asked for again after the next join."""
        del now
        self.last_error = cause
        if self.phase != ENDED:
            self._drop(OFFLINE)

    def receive(self, message: Message, payload: Any, now: float) -> None:
        """A message has come from the syncer."""
        self._heard_s = now
        if isinstance(message, Welcome):
            self._welcomed(message, now)
        elif isinstance(message, Refused):
            self._refused(message, now)
        elif self.phase != ATTACHED or message.generation != self.generation:
            return  # of an ended generation, or a join of our own is under way
        elif isinstance(message, Rejoin):
            self._join(now)
        elif isinstance(message, Pong):
            self.progress.pong(message.ping, now)
            self.unheard.answered(message.ping)
        else:
            self._deliver(message, payload, now)

    def _welcomed(self, welcome: Welcome, now: float) -> None:
        if self.phase != JOINING or welcome.number != self._number:
            return
        if welcome.epoch < self.epoch:
            self._reconnect(f"a syncer of epoch {welcome.epoch}, older than {self.epoch}, answered")
            return
        if self.run_id and welcome.run_id != self.run_id:
            self._fail(
                f"the syncer at {self._address} runs {welcome.run_id!r}; this learner belongs to "
                f"{self.run_id!r}. Start a new learner for the new run."
            )
            return
        seen_at = welcome.peer_address.rpartition(":")[0] or welcome.peer_address
        if self._via and seen_at != self._via:
            self._fail(
                f"connected past its proxy: the syncer sees this learner at "
                f"{welcome.peer_address!r}, DD_VIA says {self._via!r}. Give it the proxy's address."
            )
            return
        self.phase, self.generation, self.epoch = ATTACHED, welcome.generation, welcome.epoch
        self._id_wait = IdWait()
        self.run_id, self.fingerprint = welcome.run_id, welcome.fingerprint
        self.timeouts = SyncerConfig.load(welcome.config).timeouts
        self._template, self._held = settle_cut(self._template, self._held, welcome)
        if welcome.cut:  # it holds every fragment
            self._missing, self._connect_by = set(), None
        if self._missing is None:
            self._missing = set(range(len(welcome.fragments)))
        if self._connect_by is not None:
            self._connect_by = now + self._connect_timeout_s
        self.inner.welcomed(welcome)
        self.unheard.stated(self.progress.pings)
        self._actions.append(Deliver(welcome))
        if self.inner.described is not None:
            self._send(self.inner.described)
        self._send_progress(now)
        if self._finish is not None:
            self._send(self._finish)

    def _refused(self, refused: Refused, now: float) -> None:
        if self.phase != JOINING or refused.number != self._number:
            return
        self.last_error = refused.reason
        if refused.fatal or not self._id_wait.refused(self._join_sent_s, refused.retry_s, now):
            self._fail(f"the syncer at {self._address} refused it: {refused.reason}")

    def _deliver(self, message: Message, payload: Any, now: float) -> None:
        if isinstance(message, Fragment):
            if message.version[0] < self.epoch:
                return
            if self._connect_by is not None and self._missing is not None:
                self._missing.discard(message.fragment)
                self._connect_by = now + self._connect_timeout_s if self._missing else None
            self._send(Received(generation=0, fragment=message.fragment, version=message.version))
            self._close_rounds(message.fragment, message.round)
        elif isinstance(message, Pull):
            if message.epoch < self.epoch:
                return
        elif isinstance(message, Closed):
            self._close_rounds(message.fragment, message.round)
        elif isinstance(message, Verdict):
            self.last_error = f"round {message.round}: {message.reason}"
            key = (message.epoch, message.round)
            self._keep_uploads(lambda s: s.fragment != message.fragment or s.round != key)
        elif isinstance(message, Released):
            self._drop(ENDED)
        elif isinstance(message, DonateState):
            if not self.inner.begins(message):
                return
        elif isinstance(message, StateOver):
            self.inner.over(message)
        elif not isinstance(message, HANDED_ON):
            return  # not for a learner
        self._actions.append(Deliver(message, payload))

    # ------------------------------------------------------------------ from the training side

    def report(
        self,
        held: Held,
        now: float,
        *,
        state: str = "training",
        step_seconds: float | None = None,
        seconds_stepping: float = 0.0,
        loss: float | None = None,
        boundary_s: float | None = None,
    ) -> None:
        """What the learner holds after a boundary, and the step before it if there was one.

        `boundary_s`: what the boundary before that step took, without waits.
        """
        self._held = held
        urgent = self.progress.add(state, step_seconds, seconds_stepping, loss, boundary_s)
        if self.phase == ATTACHED and (urgent or self.progress.is_due(now)):
            self._send_progress(now)

    def contribute(self, snapshot: Snapshot) -> None:
        """Queue for upload; one older or equal of that fragment gives way."""
        if self.phase == ATTACHED:
            self._keep_uploads(lambda s: s.fragment != snapshot.fragment)
            self._uploads.append(snapshot)

    def initial(self, fragment: int, values: Mapping[str, Tensor]) -> None:
        """Queue version 0 of a fragment for upload."""
        if self.phase == ATTACHED:
            self._uploads.append(InitialValues(fragment, values))

    def say(self, message: Message) -> None:
        """Send now; while detached it is left out, since the next join states what is held."""
        if isinstance(message, Applied):
            self.unheard.said(message, self.progress.pings)
        if self.phase == ATTACHED:
            self._send(message)

    def describe(self, inner: Inner) -> None:
        """Say now, and after every join from now on, what the inner optimizer is."""
        self.inner.described = inner
        self.say(inner)

    def finish(self, held: Held, reason: str, now: float) -> None:
        """The last inner step is done. Said again after every join from now on."""
        self._held = held
        self._finish = Finish(generation=0, step=held.step, odometer=held.odometer, reason=reason)
        if self.phase == ATTACHED:
            self._send_progress(now)

    def goodbye(self, reason: str) -> None:
        """The learner leaves now."""
        if self.phase == ATTACHED:
            self._send(Goodbye(generation=0, reason=reason))
        self._drop(ENDED)

    # ------------------------------------------------------------------ uploads

    @property
    def has_uploads(self) -> bool:
        """Whether something waits for the data channel."""
        return bool(self._uploads) or self.inner.ready

    def next_upload(self) -> Upload | None:
        """The next contribution to encode and send; ask only when the data channel is free."""
        return self._uploads.popleft() if self.phase == ATTACHED and self._uploads else None

    def stamp(self, upload: Upload, payload: Payload) -> Contribution | Initial:
        """The header of an upload under the current generation."""
        return stamped(upload, payload, self.generation, self.fingerprint)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Do what is due: repeat a join, report, notice silence, give up at the deadline."""
        if self.phase == ENDED:
            return
        if self._connect_by is not None and now >= self._connect_by:
            what = "its fragments did not come" if self.phase == ATTACHED else "not connected"
            self._fail(
                f"no syncer at {self._address}: {what} within {self._connect_timeout_s:g} s, "
                f"{self.attempts} attempts. Start it, or correct the address (DD_SYNCER). "
                f"Last error: {self.last_error or 'no answer'}"
            )
        elif self.phase != OFFLINE and now >= self._heard_s + self._silence_s:
            self._reconnect(f"nothing heard for {self._silence_s:g} s")
        elif self.phase == JOINING and now >= self._id_wait.due_s(
            self._join_sent_s, self.timeouts.heartbeat
        ):
            if self._id_wait.again_s is None:
                self._send_join(now)
            else:
                self._join(now)  # it was refused: asked anew
        elif self.phase == ATTACHED and now >= self.progress.due_s(self.timeouts.heartbeat):
            self._send_progress(now)

    def next_deadline(self) -> float | None:
        """When `tick` is to be called at the latest; None: nothing is due."""
        if self.phase == ENDED:
            return None
        times = [] if self._connect_by is None else [self._connect_by]
        if self.phase != OFFLINE:
            times.append(self._heard_s + self._silence_s)
        if self.phase == JOINING:
            times.append(self._id_wait.due_s(self._join_sent_s, self.timeouts.heartbeat))
        if self.phase == ATTACHED:
            times.append(self.progress.due_s(self.timeouts.heartbeat))
        return min(times, default=None)

    def take(self) -> list[LinkAction]:
        """What is to be done now, in order; each is handed out once."""
        actions, self._actions = self._actions, []
        return actions

    # ------------------------------------------------------------------ pieces

    @property
    def _silence_s(self) -> float:
        """An unanswered join may have met a dead path. Once attached, answers may stand behind a
        large fragment for long, and the channel's own heartbeats notice a dead path."""
        return self.timeouts.lease if self.phase == JOINING else self.timeouts.round

    def _join(self, now: float) -> None:
        self._drop(JOINING)
        self._id_wait.again_s = None
        self._number += 1
        self._send_join(now)

    def _send_join(self, now: float) -> None:
        self._join_sent_s = now
        join = join_of(
            self._template,
            self._held,
            self.inner.wants_state,
            self.unheard.all,
            number=self._number,
            run_id=self.run_id,
            generation=self.generation,
            epoch=self.epoch,
        )
        self._actions.append(Send(join))

    def _send(self, message: Any) -> None:
        self._actions.append(Send(replace(message, generation=self.generation)))

    def _send_progress(self, now: float) -> None:
        self._send(self.progress.message(self._held, self.last_error, now))
        if self._finish is not None:  # said again with every report: one may be lost
            self._send(self._finish)

    def _close_rounds(self, fragment: int, upto: RoundKey) -> None:
        self._keep_uploads(lambda s: s.fragment != fragment or s.round > upto)

    def _keep_uploads(self, wanted: Callable[[Snapshot], bool]) -> None:
        self._uploads = deque(u for u in self._uploads if isinstance(u, InitialValues) or wanted(u))

    def _drop(self, phase: str) -> None:
        self.phase = phase
        self._uploads.clear()
        self.inner.drop()

    def _reconnect(self, reason: str) -> None:
        self.last_error = reason
        self._drop(OFFLINE)
        self._actions.append(Reconnect(reason))

    def _fail(self, reason: str) -> None:
        self._drop(ENDED)
        self._actions.append(Fail(reason))
