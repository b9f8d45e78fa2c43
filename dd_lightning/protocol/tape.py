"""The event tape: append-only JSON lines, one writer, from which summary, report and replay read.

Schema 1. Each event has `event` and `t_s`; `FIELDS` lists what each kind must carry (more may be
added). A crash in the middle of a line loses that line only: it is cut off when the tape is opened
again, so every line that a reader sees parses. `flush()` is called after every event, `sync()`
(fsync) at checkpoints: a power cut loses what came after the last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = 1

FIELDS: dict[str, tuple[str, ...]] = {
    "run": ("schema", "config", "seed", "versions"),
    "syncer_start": ("epoch", "versions"),
    "layout": ("fragments", "averaged", "elements", "fingerprint"),
    "start": ("epoch", "training"),
    "join": (
        "learner",
        "generation",
        "cause",
        "continues",
        "state_from",
        "state_step",
        "data_position",
    ),
    "state": ("learner", "generation", "state"),
    "leave": ("learner", "generation", "cause"),
    "dead": ("learner", "generation", "cause"),
    "refused": ("reason", "count"),
    "warning": ("text",),
    "donation": ("learner", "donor", "transfer", "outcome"),
    "learner_checkpoint": ("learner", "generation", "step"),
    "learner_stats": ("learner", "generation", "step", "odometer"),
    "round_open": ("epoch", "round", "fragment", "roster", "quorum"),
    "round_cancelled": ("epoch", "round", "fragment"),
    "contribution": (
        "epoch",
        "round",
        "fragment",
        "learner",
        "generation",
        "step",
        "steps",
        "tokens",
        "base_version",
        "digest",
        "verdict",
    ),
    "merge": (
        "epoch",
        "round",
        "fragment",
        "version",
        "contributors",
        "quorum_s",
        "grace_s",
        "agreement",
        "digest",
    ),
    "apply": ("learner", "generation", "step", "epoch", "fragment", "version"),
    "lost": ("learner", "generation", "fragment", "tokens", "cause"),
    "ledger": ("learner", "fragments"),
    "fault": ("kind", "target", "planned", "fired"),
    "checkpoint": ("epoch", "file", "tokens_merged"),
    "evaluation": ("file", "loss", "metrics"),
    "run_end": ("status",),
}


class TapeError(ValueError):
    """The tape cannot be read: which line, and why."""


def clean(value: Any) -> Any:
    """NaN and Infinity are not JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [clean(item) for item in value]
    return value


class TapeWriter:
    """Appends events to `path`; opening it cuts off a torn last line first."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = open(self.path, "ab+")  # noqa: SIM115 (held for the run)
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        position = size
        while position > 0:
            start = max(0, position - 65536)
            self._file.seek(start)
            newline = self._file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < size:
            self._file.truncate(position)
        self._file.seek(0, os.SEEK_END)

    def write(self, event: str, t_s: float, **fields: Any) -> None:
        """Append one event. Raises ValueError for an unknown kind or a missing promised field."""
        if event not in FIELDS:
            raise ValueError(f"tape event {event!r} is unknown; allowed: {', '.join(FIELDS)}")
        missing = [name for name in FIELDS[event] if name not in fields]
        if missing:
            raise ValueError(f"tape event {event!r} lacks {', '.join(missing)}")
        record = {"event": event, "t_s": round(t_s, 6), **clean(fields)}
        self._file.write(
            json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        )
        self._file.flush()

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out and close."""
        if not self._file.closed:
            self.sync()
            self._file.close()


def read_tape(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Every event in order. A torn last line (a writer was killed in it) is left out.

    Raises:
        TapeError: a line in the middle does not parse, or the tape's schema is newer than ours.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TapeError(f"{path}, line {number} is not JSON: {error}") from error
            if record.get("event") == "run" and record.get("schema", 0) > SCHEMA:
                raise TapeError(
                    f"{path} has tape schema {record['schema']}; this version reads up to "
                    f"{SCHEMA}. "
                    "Read it with the dd_lightning that wrote it."
                )
            yield record
