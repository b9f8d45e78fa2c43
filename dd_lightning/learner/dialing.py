"""Dialling the syncer, one bounded attempt a call: where it was, else where it is now.

After an outage nobody should wait for the kernel: a connection that lived through it is used again
only at TCP's next retransmission, a SYN is sent again after 1, 3, 7 s. Hence short attempts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dd_lightning.protocol.config import Timeouts

log = logging.getLogger(__name__)

FIRST_S = 5.0  # the first connection's whole handshake, of which nothing is known yet
SHORTEST_S, LONGEST_S = 0.5, 1.0  # TCP connection of a later attempt
TIMES_MEASURED = 3.0  # a handshake may take so many times what the fastest one took
MOST_S = 2.0  # or, after attempts without an answer (a busy machine), so long
GENEROUS_EVERY = 30  # attempts without an answer: one is as patient as the first, and looks anew
LISTEN_S = 0.5  # to a store's connection before asking: longer than a proxy delays a close by
MOST_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one attempt, seconds: its TCP connections, and all of it."""

    dial_s: float
    whole_s: float


class Dialled(Protocol):
    """A channel; whether silence ended it."""

    was_silent: bool


class Attempts:
    """What former attempts teach the next: its bounds, and the patience with a silent path."""

    def __init__(self) -> None:
        self.timeouts: Callable[[], Timeouts] = Timeouts
        self._took_s = FIRST_S / TIMES_MEASURED  # the fastest handshake so far
        self._unanswered = 0  # attempts in a row
        self._last: Dialled | None = None
        self._false_alarms = 0  # in a row: silences that were none

    def patience_s(self) -> float:
        """How long a channel may be silent. It doubles with each false alarm: a path that answers
        the first attempt at once was only slow, and dropping it costs the upload under way."""
        silence_s = self.timeouts().silence
        return min(silence_s * 2**self._false_alarms, max(MOST_PATIENCE_S, silence_s))

    @property
    def is_generous(self) -> bool:
        """Whether the next is as patient as the first, and looks anew."""
        return self._unanswered % GENEROUS_EVERY == GENEROUS_EVERY - 1

    def bounds(self, known: bool) -> Bounds:
        """A SYN is sent again after a second, so no attempt waits longer for its connections. What
        was accepted by a proxy or tunnel may still be a SYN beyond it: not much longer either.

        Args:
            known: it was there before.
        """
        if not known or self.is_generous:
            return Bounds(FIRST_S, FIRST_S)
        expected_s = max(TIMES_MEASURED * self._took_s, SHORTEST_S)
        grown_s = max(expected_s, min(SHORTEST_S * 2 ** min(self._unanswered, 8), MOST_S))
        return Bounds(min(grown_s, LONGEST_S), min(grown_s, FIRST_S))

    def opened(self, took_s: float) -> None:
        """A handshake took so long."""
        self._took_s = min(self._took_s, took_s)

    def succeeded(self, channel: Dialled) -> None:
        """The attempt has made this channel."""
        if self._last is not None and self._last.was_silent:
            self._false_alarms += 1
        self._unanswered = 0
        self._last = channel

    def failed(self, error: OSError) -> None:
        """The attempt came to nothing: no answer (a TimeoutError), or one that it is not there."""
        self._last = None
        if isinstance(error, TimeoutError):
            self._unanswered += 1
            self._false_alarms = 0


class Dialer:
    """Call it for a channel; it raises OSError where there is none, within the bounds.

    Args:
        look_up: the rendezvous, from (timeout, seconds to hear first whether it closes).
        open_channel: a channel from (rendezvous, patience with a silent path, bounds).
    """

    def __init__(
        self,
        look_up: Callable[[float, float], Any],
        open_channel: Callable[[Any, Callable[[], float], Bounds], Dialled],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look_up, self._open_channel, self._clock = look_up, open_channel, clock
        self._attempts = Attempts()
        self._known: Any = None  # the rendezvous of the last channel
        self._listen_s = 0.0  # from the second time on

    def follow(self, timeouts: Callable[[], Timeouts]) -> None:
        """Take timeouts from there: the run's are known from the first welcome on."""
        self._attempts.timeouts = timeouts

    def patience_s(self) -> float:
        """How long a channel may be silent (`Attempts.patience_s`)."""
        return self._attempts.patience_s()

    def __call__(self) -> Any:
        """One attempt. Raises OSError (a TimeoutError where nothing answered)."""
        try:
            channel = self._attempt()
        except OSError as error:
            self._attempts.failed(error)
            raise
        self._attempts.succeeded(channel)
        return channel

    def _attempt(self) -> Dialled:
        if self._known is not None and not self._attempts.is_generous:
            try:
                return self._open(self._known)
            except (TimeoutError, PermissionError):
                raise
            except OSError:
                log.debug("nobody is where the syncer was; asking the rendezvous", exc_info=True)
        listen_s, self._listen_s = self._listen_s, LISTEN_S
        found = self._look_up(self._attempts.timeouts().store, listen_s)
        channel = self._open(found)
        self._known = found
        return channel

    def _open(self, found: Any) -> Dialled:
        began_s = self._clock()
        bounds = self._attempts.bounds(known=self._known is not None)
        channel = self._open_channel(found, self.patience_s, bounds)
        self._attempts.opened(self._clock() - began_s)
        return channel
