"""The event tape: append-only JSON lines, one writer, from which summary, report and replay read.

Schema 1. Each event has `event` and `t_s`; `FIELDS` lists what each kind must carry (more may be
added). A crash in the middle of a line loses that line only: it is cut off when the tape is opened
again, so every line that a reader sees parses. `flush()` is called after every event, `sync()`
(fsync) before checkpoints: a power cut loses what came after the last checkpoint.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any

from dd_lightning import crash_points

SCHEMA = 1
MOST_WAITING_BYTES = 16 << 20  # rows in memory while the disk is full: hours of a run

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
    # data-parallel: one synchronous step of `members`, with the tokens of each; and all of them
    # going back to the checkpoint of `step`
    "all_reduce": ("step", "members", "tokens", "compute_s", "reduce_s"),
    "rewind": ("step", "steps_lost", "cause"),
    "lost": ("learner", "generation", "fragment", "tokens", "cause"),
    "ledger": ("learner", "fragments"),
    "fault": ("kind", "target", "planned", "fired"),
    "checkpoint": ("epoch", "file", "tokens_merged"),
    "cut": ("cut", "state"),  # state: asked | recorded | done | failed
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
    """Appends events to `path`; opening it cuts off a torn last line first.

    A disk that takes no more does not end the run: rows wait in memory, in order, and are written
    once it does again, the rest of a half written one first. Lost if the process dies meanwhile:
    the rows that wait. Beyond `most_waiting_bytes` of them nothing is dropped: writing raises,
    since a tape with a hole in it cannot be trusted.
    """

    def __init__(
        self, path: str | os.PathLike[str], most_waiting_bytes: int = MOST_WAITING_BYTES
    ) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.error: OSError | None = None  # why rows wait
        self._most_waiting_bytes = most_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        # unbuffered: a buffer would keep half of a refused row, and nobody could tell which
        self._file: FileIO = open(self.path, "ab+", buffering=0)  # noqa: SIM115 (held for the run)
        self._cut_torn_line()
        self.is_new = self._file.seek(0, os.SEEK_END) == 0

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

    def write(self, event: str, t_s: float, **fields: Any) -> None:
        """Append one event.

        Raises:
            ValueError: an unknown kind, or a promised field is missing.
            TapeError: the disk refuses rows, and too many wait for it.
        """
        if event not in FIELDS:
            raise ValueError(f"tape event {event!r} is unknown; allowed: {', '.join(FIELDS)}")
        missing = [name for name in FIELDS[event] if name not in fields]
        if missing:
            raise ValueError(f"tape event {event!r} lacks {', '.join(missing)}")
        record = {"event": event, "t_s": round(t_s, 6), **clean(fields)}
        row = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        if crash_points.is_next("tape.half_row"):
            self._file.write(row[: len(row) // 2])
        crash_points.reach("tape.half_row")
        self._waiting.append(row)
        self._waiting_bytes += len(row)
        if not self.flush() and self._waiting_bytes > self._most_waiting_bytes:
            raise TapeError(
                f"{self.path} cannot be written ({self.error}), and {len(self._waiting)} rows wait "
                f"for it, more than {self._most_waiting_bytes} bytes: the run ends here rather "
                "than with a hole in its tape. Free space, then resume it."
            )

    def flush(self) -> bool:
        """Write what waits; whether all of it is written."""
        try:
            while self._waiting:
                row = self._waiting[0]
                written = self._file.write(row) or 0
                self._waiting_bytes -= written
                if written < len(row):  # the disk is full in the middle of it
                    self._waiting[0] = row[written:]
                else:
                    self._waiting.popleft()
        except OSError as error:
            self.error = error
            return False
        self.error = None
        return True

    @property
    def num_waiting(self) -> int:
        """Rows that are not written."""
        return len(self._waiting)

    def sync(self) -> None:
        """Force what was written to the disk; from any thread.

        Raises:
            OSError: it cannot be, or rows wait: what relies on the tape may not go ahead of it.
        """
        if self.error is not None:
            raise OSError(self.error.errno, f"rows of the tape wait: {self.error.strerror}")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Write out and close. Raises TapeError when rows are lost by it, once closed."""
        if self._file.closed:
            return
        lost = 0 if self.flush() else len(self._waiting)
        if not lost:
            os.fsync(self._file.fileno())
        self._file.close()
        if lost:
            raise TapeError(f"{self.path} lacks its last {lost} rows: {self.error}. Free space.")


def read_tape(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Every event in order. A torn last line (a writer was killed in it) is left out.

    Raises:
        TapeError: a line in the middle is no event, or the tape's schema is newer than ours.
    """
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError as error:
                raise TapeError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(record, dict) or not {"event", "t_s"} <= record.keys():
                raise TapeError(
                    f"{path}, line {number} is no event of a tape: it lacks event or t_s. Give the "
                    "tape.jsonl of a run."
                )
            if record["event"] == "run" and record.get("schema", 0) > SCHEMA:
                raise TapeError(
                    f"{path} has tape schema {record['schema']}; this version reads up to "
                    f"{SCHEMA}. "
                    "Read it with the dd_lightning that wrote it."
                )
            yield record
