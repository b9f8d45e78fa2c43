"""What the syncer tells while it runs: the tape and its listeners, status.json, odd peers."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dd_lightning.protocol.tape import TapeWriter

log = logging.getLogger(__name__)

ODD_PEER_EVERY_S = 60.0
MOST_ODD_PEERS = 1024  # whose last message in the log is remembered
PACKAGES = ("torch", "lightning", "msgspec", "pyzmq", "numpy", "dd-lightning")

Listener = Callable[[Mapping[str, Any]], None]


class TapeFeed:
    """Writes events to the tape, then hands each to the listeners (Aim)."""

    def __init__(self, tape: TapeWriter, listeners: Sequence[Listener] = ()) -> None:
        self._tape = tape
        self._listeners = tuple(listeners)

    def write(self, event: str, t_s: float, fields: Mapping[str, Any]) -> None:
        """Append an event; a `t_s` among the fields (an arrival's) comes before the one given."""
        fields = dict(fields)
        t_s = fields.pop("t_s", t_s)
        self._tape.write(event, t_s, **fields)
        for listener in self._listeners:
            listener({"event": event, "t_s": t_s, **fields})

    def sync(self) -> None:
        """Force what was written to the disk."""
        self._tape.sync()


class StatusFile:
    """`status.json`, rewritten in one rename at most once in `every_s`."""

    def __init__(self, path: Path, every_s: float = 1.0) -> None:
        self._path, self._every_s = path, every_s
        self._due_s = 0.0

    def due(self, now: float) -> bool:
        """Whether it is time to write."""
        return now >= self._due_s

    def write(self, status: Mapping[str, Any], now: float) -> None:
        """Write now."""
        self._due_s = now + self._every_s
        partial = self._path.with_name(self._path.name + ".partial")
        partial.write_text(json.dumps(status))
        os.replace(partial, self._path)


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
