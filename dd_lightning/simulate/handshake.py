"""Making a connection in virtual time: round trips over a fresh pair of paths, within bounds."""

from __future__ import annotations

from collections.abc import Callable

from dd_lightning.learner.dialing import Bounds
from dd_lightning.network.link import Direction, Path
from dd_lightning.simulate.virtual_time import VirtualTime

# Both measured, over the proxy with a round trip of 0.4 s:
ASK_ROUND_TRIPS = 13  # torch's TCPStore client connects, greets, waits for five keys, gets each
CHANNEL_ROUND_TRIPS = 3  # TCP's, and ZeroMQ's greeting and READY


class Handshake:
    """Settles once: `done(None)`, or an error where nobody listened or nothing answered in time.

    Args:
        paths: by direction; the first packet each way is a SYN or its answer, which an outage
            delays as the kernel's timer says (`Path.dial`).
        is_there: whether somebody listens, asked when the first packet has come.
    """

    def __init__(
        self,
        time: VirtualTime,
        paths: dict[Direction, Path],
        is_there: Callable[[], bool],
        round_trips: int,
        bounds: Bounds,
        done: Callable[[OSError | None], None],
    ) -> None:
        self._time, self._paths, self._is_there = time, paths, is_there
        self._left, self._bounds, self._done = round_trips, bounds, done
        self._is_connected = self._is_settled = False

    def begin(self) -> None:
        """Send the first packet now."""
        now = self._time.now
        self._time.at(now + self._bounds.dial_s, self._dialled_too_long)
        self._time.at(now + self._bounds.whole_s, lambda: self._late(self._bounds.whole_s))
        self._time.at(self._paths["up"].dial(now), self._asked)

    def _asked(self) -> None:
        """A packet is at the syncer's end, which answers it."""
        if self._is_settled:
            return
        now, way = self._time.now, self._paths["down"]
        if not self._is_there():
            refused = ConnectionRefusedError("nobody listens")
            self._time.at(way.send(now, 0), lambda: self._settle(refused))
        else:
            back = way.send(now, 0) if self._is_connected else way.dial(now)
            self._time.at(back, self._answered)

    def _answered(self) -> None:
        if self._is_settled:
            return
        self._is_connected = True
        self._left -= 1
        if self._left:
            self._time.at(self._paths["up"].send(self._time.now, 0), self._asked)
        else:
            self._settle(None)

    def _dialled_too_long(self) -> None:
        if not self._is_connected:
            self._late(self._bounds.dial_s)

    def _late(self, after_s: float) -> None:
        self._settle(TimeoutError(f"nothing answered within {after_s:g} s"))

    def _settle(self, error: OSError | None) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._done(error)
