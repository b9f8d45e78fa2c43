"""Hands a run to a logger (Aim, TensorBoard, W&B) in a thread of its own: a dashboard never holds
up, and never ends, the run that it shows."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from dd_lightning.report.observer import Event
from dd_lightning.report.points import Note, Point, Points, notes_of
from dd_lightning.report.read import EVALUATIONS, read_evaluations
from dd_lightning.report.summary import write_atomically

log = logging.getLogger(__name__)

MOST_QUEUED = 10_000  # events; a run at full speed makes some hundred a second
EVALUATIONS_EVERY_S = 2.0  # how often the evaluator's file is looked at
STATES = "loggers"  # folder in the run's: what each logger has of the run


@dataclass(frozen=True, slots=True)
class About:
    """The run, as a logger needs it before its first point.

    Args:
        began_wall_s: when it began; points of a run in virtual time are dated from it.
        config: the run's configuration, without absolute paths.
    """

    run_id: str
    folder: Path
    began_wall_s: float
    config: Mapping[str, Any] = field(default_factory=dict)
    hparams: Mapping[str, Any] = field(default_factory=dict)
    tags: Sequence[str] = ()


class Writer(Protocol):
    """One logger's side; made and used by the log's thread alone. It may raise anything."""

    def begin(self, about: About, key: str | None) -> str:
        """Open the run, or go on with that of `key`; returns the key to go on with it later."""
        ...

    def points(self, points: Sequence[Point], at_s: float) -> None:
        """Points of one event, `at_s` seconds into the run."""
        ...

    def note(self, note: Note) -> None:
        """Something that happened."""
        ...

    def end(self, summary: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """What is known once all is over: `summary.json` and the report's figures."""
        ...

    def close(self) -> None:
        """Write out."""
        ...


class RunLog:
    """One logger of a run.

    `event()` puts a tape event into a bounded queue and returns; when the queue is full the oldest
    is dropped and counted. One process writes at a time: after `close()` another may go on (the
    launcher adds the last evaluations, faults, summary and figures so, once the syncer has exited),
    and so does a syncer that is started again.

    What failures lose: a logger that raises gets nothing more of this process, with a warning; a
    kill loses what was queued; a stuck logger what is left at `close`. The run loses nothing.

    Args:
        make: the writer, called in the thread (its package is imported there).
        past: events of earlier starts, to count on from; nothing of them is written again.
        least_interval_s: a series gets at most one point in so many seconds of the run.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Writer],
        about: About,
        *,
        past: Iterable[Event] = (),
        least_interval_s: float = 2.0,
        most_queued: int = MOST_QUEUED,
    ) -> None:
        self.name, self.dropped = name, 0
        self.failure: str | None = None  # why nothing more is written
        self.cpu_s = 0.0  # that the thread took
        self.key: str | None = None  # by which the logger knows the run, once it has begun
        self._make, self._about, self._past = make, about, past
        self._state: _State  # set by the thread
        self._points = Points(least_interval_s)
        self._tokens: dict[str, Any] = {}  # checkpoint file to tokens merged
        self._looked_s = 0.0
        self._queue: deque[Event] = deque(maxlen=most_queued)
        self._wake = threading.Condition()
        self._closing = False
        self._last: tuple[Mapping[str, Any] | None, list[Path]] = (None, [])
        # a daemon: an exit without close() must not wait for the disk
        self._thread = threading.Thread(target=self._main, name=f"{name}-log", daemon=True)
        self._thread.start()

    def event(self, record: Event) -> None:
        """Take a tape event; never waits for the logger."""
        with self._wake:
            self.dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(record)
            self._wake.notify()

    def close(
        self,
        timeout_s: float,
        summary: Mapping[str, Any] | None = None,
        figures: Iterable[Path] = (),
    ) -> str | None:
        """Write what is queued, summary and figures; returns what was lost, in words.

        After `timeout_s` the rest is given up.
        """
        with self._wake:
            self._last = (summary, list(figures))
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        said = []
        if self._thread.is_alive():
            said.append(f"has not taken everything within {timeout_s:g} s; the rest is given up")
        if self.dropped:
            said.append(f"was too slow for {self.dropped} events, which it does not have")
        for text in said:
            log.warning("logger %s %s", self.name, text)
        if self.failure is not None:  # the thread has said so
            said.append(f"failed and got nothing more: {self.failure}")
        return f"logger {self.name} {' and '.join(said)}" if said else None

    # ------------------------------------------------------------------ the thread

    def _main(self) -> None:
        """Whatever the logger throws ends the dashboard, not the run."""
        writer: Writer | None = None
        try:
            self._state = _State(self._about.folder / STATES / f"{self.name}.json")
            for event in self._past:
                self._remember(event)
            writer = self._make()
            self.key = writer.begin(self._about, self._state.key)
            self._state.begun(self.key)
            while (event := self._next()) is not None:
                self._write(writer, event)
                self._look_for_evaluations(writer)
            summary, figures = self._last
            if summary is not None:
                writer.end(summary, figures)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("logger %s failed and gets nothing more: %s", self.name, self.failure)
        finally:
            self._close(writer)
            self.cpu_s = time.thread_time()

    def _close(self, writer: Writer | None) -> None:
        if writer is None:
            return
        try:
            writer.close()
        except Exception as error:  # of a disk that is full, say: the same loss, said once
            self.failure = self.failure or f"{type(error).__name__}: {error}"

    def _next(self) -> Event | None:
        """The oldest event; None once closed and empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _remember(self, event: Event) -> None:
        """What later points count on from, though `event` itself is not written."""
        if event["event"] == "checkpoint":
            self._tokens[event["file"]] = event["tokens_merged"]
        for _ in self._points.of(event):
            pass

    def _write(self, writer: Writer, event: Event) -> None:
        if event["event"] == "checkpoint":
            self._tokens[event["file"]] = event["tokens_merged"]
        if event["event"] == "evaluation" and not self._state.is_new(event):
            return
        if points := list(self._points.of(event)):
            writer.points(points, event.get("checkpoint_t_s") or event["t_s"])
        for note in notes_of(event):
            writer.note(note)
        if event["event"] == "evaluation":
            self._state.evaluated(event)

    def _look_for_evaluations(self, writer: Writer) -> None:
        """The evaluator's file, while the run lasts: its rows get onto the tape at the end only."""
        if time.monotonic() - self._looked_s < EVALUATIONS_EVERY_S:
            return
        self._looked_s = time.monotonic()
        path = self._about.folder / EVALUATIONS
        for row in read_evaluations(path) if path.is_file() else ():
            if row["file"] in self._tokens:  # else at the end, from the whole tape
                known = {"t_s": self._points.now_s, "tokens_merged": self._tokens[row["file"]]}
                self._write(writer, {**row, **known})


class _State:
    """`loggers/<name>.json`: the run's key in the logger, and the evaluations that it has."""

    def __init__(self, path: Path) -> None:
        self._path = path
        found = json.loads(path.read_text()) if path.is_file() else {}
        self.key: str | None = found.get("key")
        self._evaluations = {tuple(one) for one in found.get("evaluations", ())}

    def begun(self, key: str) -> None:
        self.key = key
        self._save()

    def is_new(self, evaluation: Event) -> bool:
        return _which(evaluation) not in self._evaluations

    def evaluated(self, evaluation: Event) -> None:
        self._evaluations.add(_which(evaluation))
        self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        state = {"key": self.key, "evaluations": sorted(self._evaluations)}
        write_atomically(self._path, json.dumps(state).encode())


def _which(evaluation: Event) -> tuple[str, bool, bool]:
    """One evaluation: of which checkpoint, and on what occasion."""
    flags = (bool(evaluation.get("initial")), bool(evaluation.get("final")))
    return (str(evaluation["file"]), *flags)
