"""What the syncer tells while it runs: the tape and its listeners, status.json, odd peers."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dd_lightning.protocol.tape import MOST_WAITING_BYTES, TapeError, TapeWriter
from dd_lightning.syncer.run_files import write_small

log = logging.getLogger(__name__)

RETRY_S = 0.1  # at the end of a run, while its last rows wait for space
ODD_PEER_EVERY_S = 60.0
MOST_ODD_PEERS = 1024  # whose last message in the log is remembered
PACKAGES = ("torch", "lightning", "msgspec", "pyzmq", "numpy", "dd-lightning")

Listener = Callable[[Mapping[str, Any]], None]


class TapeFeed:
    """Writes events to the tape, then hands each to the listeners (Aim). What a full disk does to
    the tape: `TapeWriter`."""

    def __init__(self, tape: TapeWriter, listeners: Sequence[Listener] = ()) -> None:
        self._tape = tape
        self._listeners = tuple(listeners)
        self._is_refused = False  # and it was said

    def write(self, event: str, t_s: float, fields: Mapping[str, Any]) -> None:
        """Append an event; a `t_s` among the fields (an arrival's) comes before the one given."""
        fields = dict(fields)
        t_s = fields.pop("t_s", t_s)
        self._tape.write(event, t_s, **fields)
        for listener in self._listeners:
            listener({"event": event, "t_s": t_s, **fields})
        self._say_if_refused(t_s)

    def warn(self, text: str, t_s: float) -> None:
        """To the log and the tape."""
        log.warning("%s", text)
        self.write("warning", t_s, {"text": text})

    def _say_if_refused(self, t_s: float) -> None:
        error = self._tape.error
        if error is not None and not self._is_refused:
            self._is_refused = True
            self.warn(
                f"the tape cannot be written ({error.strerror}): its rows wait in memory, up to "
                f"{MOST_WAITING_BYTES >> 20} MiB, and are lost if the syncer dies before they are "
                "written. Free space in the run's folder.",
                t_s,
            )
        self._is_refused = error is not None

    def flush(self) -> bool:
        """Write what a full disk has refused before; whether nothing waits any more."""
        return not self._is_refused or self._tape.flush()

    def finish(self, timeout_s: float) -> None:
        """The last row was written: it reaches the file within `timeout_s`.

        Raises:
            TapeError: it does not; the tape is whole up to the first row that waits.
        """
        until = time.monotonic() + timeout_s
        while not self.flush():
            if time.monotonic() >= until:
                raise TapeError(
                    f"the last {self._tape.num_waiting} rows of the tape are lost: "
                    f"{self._tape.error}. What is there is whole; the run's end is not on it."
                )
            time.sleep(RETRY_S)

    def sync(self) -> None:
        """Force what was written to the disk; from any thread. Raises OSError."""
        self._tape.sync()


class StatusFile:
    """`status.json`, rewritten in one rename at most once in `every_s`. On a full disk the one
    before it stays; nothing of the run is lost by that."""

    def __init__(
        self,
        path: Path,
        every_s: float = 1.0,
        warn: Callable[[str, float], None] = lambda text, t_s: None,
    ) -> None:
        self._path, self._every_s = path, every_s
        self._warn = warn
        self._due_s = 0.0
        self._is_refused = False

    def due(self, now: float) -> bool:
        """Whether it is time to write."""
        return now >= self._due_s

    def write(self, status: Mapping[str, Any], now: float) -> None:
        """Write now."""
        self._due_s = now + self._every_s
        try:
            self._put(json.dumps(status))
        except OSError as error:
            if not self._is_refused:
                self._warn(
                    f"{self._path.name} cannot be written ({error.strerror}): what it shows is "
                    "old. Free space in the run's folder.",
                    now,
                )
            self._is_refused = True
        else:
            self._is_refused = False

    def _put(self, text: str) -> None:
        write_small(self._path, text)


class OddPeers:
    """Counts what strangers send; one line per peer and minute in the log and on the tape."""

    def __init__(self, feed: TapeFeed) -> None:
        self._feed = feed
        self._counts: dict[str, int] = {}  # since the last line
        self._said_s: dict[str, float] = {}
        self.total = 0

    def saw(self, peer: str, reason: str, now: float) -> None:
        """`peer` (a host, or HOST:PORT) sent something that is no message of ours."""
        self.total += 1
        host, colon, port = peer.rpartition(":")
        # a port is new at every connection: a health check would be a new peer each time
        peer = host if colon and port.isdecimal() else peer
        self._counts[peer] = self._counts.get(peer, 0) + 1
        if now - self._said_s.get(peer, -ODD_PEER_EVERY_S) < ODD_PEER_EVERY_S:
            return
        while len(self._said_s) >= MOST_ODD_PEERS:
            oldest = next(iter(self._said_s))
            del self._said_s[oldest]
            self._counts.pop(oldest, None)
        self._said_s.pop(peer, None)
        self._said_s[peer] = now
        count = self._counts.pop(peer)
        log.warning("%d refused from %s: %s", count, peer, reason)
        self._feed.write("refused", now, {"reason": reason, "count": count})


def package_versions() -> dict[str, str]:
    """Python's and the packages' that a result depends on."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "source"
    return found


def without_paths(value: Any) -> Any:
    """The values with absolute paths cut to their last part: a tape names no folders."""
    if isinstance(value, Mapping):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    if isinstance(value, str) and os.path.isabs(value):
        return os.path.basename(value.rstrip("/"))
    return value
