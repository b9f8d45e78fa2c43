"""The comm thread: owns the channel, drives the link, encodes and decodes. Sockets only.

The training thread puts commands in and takes deliveries out; it never waits in here. What goes
wrong in the thread is raised in the training thread by `check()`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from dd_lightning.crash_points import reach
from dd_lightning.learner.payload import Coder
from dd_lightning.learner.traffic import Traffic
from dd_lightning.protocol.learner_link import LearnerLink
from dd_lightning.protocol.link_actions import Deliver, Fail, Reconnect, Send
from dd_lightning.protocol.messages import Fragment, Message, TensorInfo, Welcome

log = logging.getLogger(__name__)

POLL_S = 0.5  # at most; deadlines and `wake` make it shorter
UPLOAD_POLL_S = 0.005  # while a contribution waits for the data channel to be free
BACKOFF_S = (0.05, 1.0)  # first and longest pause between two attempts


class Channel(Protocol):
    """What the thread needs of `transport.LearnerChannel`."""

    def poll(self, timeout_s: float) -> list[Any]: ...
    def send(self, message: Message, payload: Any = None) -> bool: ...
    def can_upload(self) -> bool: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message for the training thread; `tensors` of a fragment."""

    message: Message
    tensors: Mapping[str, Tensor] | None
    arrived_s: float
    payload: Any = None  # of a piece of a donor's state


class CommThread:
    """Runs `link` over channels that `dial` makes (it raises OSError where there is none).

    Args:
        tensors: of the module, for the coder.
        clock: seconds, monotonic; the training thread uses the same.
    """

    def __init__(
        self,
        link: LearnerLink,
        dial: Callable[[], Channel],
        tensors: tuple[TensorInfo, ...],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inbox: queue.SimpleQueue[Delivery] = queue.SimpleQueue()
        self.clock = clock
        self.traffic = Traffic()
        self._link, self._dial, self._tensors = link, dial, tensors
        self._coder: Coder | None = None
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._channel_lock = threading.Lock()  # a channel is not woken while it is closed
        self._backoff_s = BACKOFF_S[0]
        self._dial_at_s = 0.0
        self._stop = threading.Event()
        self._nudge = threading.Event()  # wakes the thread while it has no channel
        self._error: BaseException | None = None
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="dd-lightning-comm", daemon=True)

    # ------------------------------------------------------------------ training thread

    def start(self) -> None:
        """Begin to connect."""
        self._thread.start()

    def call(self, command: Callable[..., None], *arguments: Any, **options: Any) -> None:
        """Run `command(*arguments)` (a method of the link) in the thread, soon."""
        self._commands.put(lambda: command(*arguments, **options))
        self._nudge.set()
        with self._channel_lock:
            if self._channel is not None:
                self._channel.wake()

    def check(self) -> None:
        """Raises ConnectionError or RuntimeError for what went wrong in the thread."""
        if self._failed:
            raise ConnectionError(self._failed)
        if self._error is not None:
            raise RuntimeError(
                f"the comm thread of this learner failed: {self._error!r}"
            ) from self._error

    def next(self, timeout_s: float) -> Delivery | None:
        """The next delivery, waiting at most so long; raises as `check`."""
        self.check()
        try:
            return self.inbox.get(timeout=timeout_s) if timeout_s > 0 else self.inbox.get_nowait()
        except queue.Empty:
            self.check()
            return None

    @property
    def has_news(self) -> bool:
        """Whether `next(0.0)` would return a delivery or raise."""
        return bool(self._failed) or self._error is not None or not self.inbox.empty()

    @property
    def wants_deltas(self) -> bool:
        """Whether the run's codec encodes deltas; known from the first welcome on."""
        return self._coder is not None and self._coder.wants_deltas

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the commands given so far; False if it is still there then."""
        self._stop.set()
        self.call(lambda: None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # ------------------------------------------------------------------ the thread itself

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._turn()
            self._run_commands()
            self._carry_out()
        except BaseException as error:
            self._error = error
            log.debug("comm thread failed", exc_info=True)
        finally:
            self._close()

    def _turn(self) -> None:
        now = self.clock()
        if self._channel is None and now >= self._dial_at_s and not self._failed:
            self._connect()
        if self._channel is None:
            self._nudge.wait(min(self._wait_s(), max(0.0, self._dial_at_s - self.clock())))
            self._nudge.clear()
        else:
            for event in self._channel.poll(self._wait_s()):
                self._take_in(event)
        self._run_commands()
        self._link.tick(self.clock())
        self._carry_out()
        self._upload()

    def _wait_s(self) -> float:
        if self._link.has_uploads:
            return UPLOAD_POLL_S
        deadline = self._link.next_deadline()
        until = POLL_S if deadline is None else deadline - self.clock()
        return max(0.0, min(POLL_S, until))

    def _connect(self) -> None:
        try:
            channel = self._dial()
        except OSError as error:
            self._not_connected(error)
            return
        with self._channel_lock:
            self._channel = channel
        self._link.connected(self.clock())
        self._carry_out()

    def _not_connected(self, error: OSError) -> None:
        """An attempt came to nothing: when the next one is made, and what the link makes of it."""
        if isinstance(error, TimeoutError):  # it has waited: the next try may be the one
            self._dial_at_s = self.clock() + BACKOFF_S[0]
        else:
            self._back_off()
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, PermissionError):  # a key that the syncer does not let in
            self._link.kept_out(cause, self.clock())
        else:
            self._link.connection_failed(cause, self.clock())
        self._carry_out()

    def _take_in(self, event: Any) -> None:
        message = getattr(event, "message", None)
        if message is None:  # the channel's word of a disconnect
            self._lose(event.reason)
        else:
            self._link.receive(message, event.payload, self.clock())
        self._carry_out()

    def _run_commands(self) -> None:
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _carry_out(self) -> None:
        for action in self._link.take():
            if isinstance(action, Send):
                if self._channel is not None:
                    self._channel.send(action.message)
            elif isinstance(action, Deliver):
                self._deliver(action)
            elif isinstance(action, Reconnect):
                log.info("reconnecting: %s", action.reason)
                self._close()
                self._back_off()
            elif isinstance(action, Fail):
                self._failed = action.reason

    def _deliver(self, action: Deliver) -> None:
        tensors = None
        if isinstance(action.message, Welcome):
            config = action.message.config
            self._coder = Coder.of(self._tensors, config["algorithm"]["codec"])
            too_large = self._coder.too_large(action.message.fragments, config["max_message_mib"])
            self._failed = self._failed or too_large
            self._backoff_s = BACKOFF_S[0]
        elif isinstance(action.message, Fragment):
            assert self._coder is not None  # a welcome comes before any fragment
            try:
                tensors = self._coder.decode(action.message.payload, action.payload)
            except ValueError as error:
                self._lose(str(error))
                return
            self.traffic.came(action.message, tensors, action.message.payload.num_bytes)
        self.inbox.put(
            Delivery(action.message, tensors, self.clock(), None if tensors else action.payload)
        )

    def _upload(self) -> None:
        channel = self._channel
        while channel is not None and self._coder is not None and channel.can_upload():
            upload = self._link.next_upload()
            if upload is None:
                if not self._donate(channel):
                    return
                continue
            payload, data = self._coder.encode(upload)
            reach("learner.upload_encoded")
            if not channel.send(self._link.stamp(upload, payload), data):
                return  # lost: it is pulled again
            self.traffic.sent(upload, payload.num_bytes)
            reach("learner.upload_sent")

    def _donate(self, channel: Channel) -> bool:
        """A piece of inner state, when no contribution waits; lost: another donor is asked."""
        chunk = self._link.inner.next_chunk(self._link.generation)
        return chunk is not None and channel.send(*chunk)

    def _lose(self, cause: str) -> None:
        self._close()
        self._back_off()
        self._link.disconnected(self.clock(), cause)

    def _back_off(self) -> None:
        self._dial_at_s = self.clock() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])

    def _close(self) -> None:
        """Closing lets a goodbye leave, which may take a while: not under the lock, on which the
        training thread would wait. Out of the lock nobody else knows the channel any more."""
        with self._channel_lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
