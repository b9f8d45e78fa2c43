"""A learner's comm in virtual time: the comm thread's own code, without its thread."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from dd_lightning.learner.comm import CommThread, Delivery
from dd_lightning.learner.dialing import Attempts
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.messages import TensorInfo
from dd_lightning.simulate.actors import Actor
from dd_lightning.simulate.channels import VirtualLearnerChannel
from dd_lightning.simulate.network import VirtualNetwork
from dd_lightning.simulate.sessions import Session


class VirtualComm(CommThread):
    """Runs the link at every event: a message, a command, a deadline. Waiting in `next` parks the
    learner's actor.

    Args:
        index: of the learner, for its region.
    """

    def __init__(
        self,
        link: LearnerLink,
        tensors: tuple[TensorInfo, ...],
        network: VirtualNetwork,
        actor: Actor,
        index: int,
    ) -> None:
        super().__init__(link, self._never, tensors, network.time.clock)
        self._network, self._time, self._actor, self._index = network, network.time, actor, index
        self._attempts = Attempts()
        self._attempts.timeouts = lambda: link.timeouts
        self._session: Session | None = None
        self._dialling = self._over = self._is_waiting = self._waits_to_upload = False
        self._wake_at: float | None = None
        self._frozen = False
        self._held: list[Callable[[], None]] = []  # what came meanwhile

    @staticmethod
    def _never() -> Any:
        raise AssertionError("a virtual comm does not dial by itself")

    # ------------------------------------------------------------------ the learner's actor

    def start(self) -> None:
        """Begin to connect."""
        self._pump()

    def call(self, command: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Run it now."""
        command(*arguments, **options)
        if not self._over:
            self._pump()

    def next(self, timeout_s: float) -> Delivery | None:
        """The next delivery, parking at most so long of virtual time."""
        self.check()
        if timeout_s > 0 and self.inbox.empty():
            self._is_waiting = True
            self._actor.park(self._time.now + timeout_s)
            self._is_waiting = False
            self.check()
        try:
            return self.inbox.get_nowait()
        except queue.Empty:
            return None

    def stop(self, timeout_s: float) -> bool:
        """Leave; nothing to wait for."""
        del timeout_s
        self._carry_out()
        self.drop()
        return True

    def drop(self) -> None:
        """The connection is dropped where it stands, as by a killed process."""
        self._over = True
        self._close()
        if self._session is not None:
            self._session.close_at_learner()

    # ------------------------------------------------------------------ a stopped process

    def freeze(self) -> None:
        """Nothing is read and no clock looked at until `thaw`."""
        self._frozen = True
        if self._session is not None:
            self._session.stop()

    def thaw(self) -> None:
        """Go on with what has come meanwhile, in order."""
        held, self._held = self._held, []
        self._frozen = False
        if self._session is not None:
            self._session.go_on()
        for event in held:
            event()

    def _is_held(self, event: Callable[[], None]) -> bool:
        if self._frozen:
            self._held.append(event)
        return self._frozen

    # ------------------------------------------------------------------ events

    def _pump(self) -> None:
        """What a turn of the comm thread does, at this instant."""
        now = self._time.now
        if self._channel is None and not self._dialling and not self._failed:
            if now >= self._dial_at_s:
                self._dialling = True
                self._begin_to_dial()
            else:
                self._come_back(self._dial_at_s)
        self._link.tick(now)
        self._carry_out()
        self._upload()
        if (deadline := self._link.next_deadline()) is not None:
            self._come_back(deadline)
        self._come_back_to_upload()

    def _begin_to_dial(self) -> None:
        """One attempt, as patient as the real dialer's."""
        known, attempts = self._session is not None, self._attempts
        self._network.dial(
            self._index,
            self._event,
            self._connected,
            attempts.bounds(known),
            ask_s=None if known and not attempts.is_generous else attempts.timeouts().store,
            patience_s=attempts.patience_s,
        )

    def _come_back_to_upload(self) -> None:
        channel = self._channel
        if not isinstance(channel, VirtualLearnerChannel) or channel.can_upload():
            return
        if not self._waits_to_upload:
            self._waits_to_upload = True
            channel.when_free(self._may_upload)

    def _may_upload(self) -> None:
        if self._over or self._is_held(self._may_upload):
            return
        self._waits_to_upload = False
        self._pump()
        self._let_go_on()

    def _come_back(self, when: float) -> None:
        """At `when` at the latest; an earlier visit that is planned already will plan the next."""
        if self._wake_at is not None and self._wake_at <= when:
            return
        self._wake_at = when
        self._time.at(when, lambda: self._visit(when))

    def _visit(self, planned: float) -> None:
        if self._over or self._wake_at != planned or self._is_held(lambda: self._visit(planned)):
            return
        self._wake_at = None
        self._pump()
        self._let_go_on()

    def _connected(self, found: Session | OSError) -> None:
        if not self._over and self._is_held(lambda: self._connected(found)):
            return
        self._dialling = False
        if self._over:
            if isinstance(found, Session):
                found.close_at_learner()
            return
        if isinstance(found, OSError):
            self._attempts.failed(found)
            self._not_connected(found)
        else:
            self._session = found
            self._channel = channel = VirtualLearnerChannel(found)
            self._waits_to_upload = False
            self._attempts.opened(found.handshake_s)
            self._attempts.succeeded(channel)
            self._link.connected(self._time.now)
        self._carry_out()
        self._pump()
        self._let_go_on()

    def _event(self, event: Any) -> None:
        if self._over or self._is_held(lambda: self._event(event)):
            return
        self._take_in(event)
        self._pump()
        self._let_go_on()

    def _let_go_on(self) -> None:
        """A learner that waits for a delivery (or for bad news) looks at once."""
        if self._is_waiting and (self._failed or not self.inbox.empty()):
            self._actor.wake()
