"""Writes a run to Aim from its tape events, in a thread of its own: a dashboard never holds up, and
never ends, the run that it shows."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dd_lightning.report.aim_points import Points
from dd_lightning.report.observer import Event

if TYPE_CHECKING:
    from aim import Run

log = logging.getLogger(__name__)

MOST_QUEUED = 10_000  # events; a run at full speed makes some hundred a second
MISSING = "logger=aim needs aim, which is not installed. Do: pip install 'dd-lightning[aim]'"


class AimRunLog:
    """One Aim run for a whole training run: a context per learner and per fragment.

    `event()` puts the event into a bounded queue and returns; when the queue is full the oldest
    event is dropped and counted. The repository is local and only one process writes a run at a
    time: after `close()` another process may go on with it by `run_hash` (the launcher adds the
    last evaluations, the summary and the figures so, once the syncer has exited).

    Args:
        repo: folder that holds (or will hold) `.aim`, or that of an Aim repository.
        experiment: Aim's name for runs that belong together.
        run_name: shown in Aim's table.
        config: the run's configuration; becomes the Aim run's `config` parameters.
        run_hash: go on with this run instead of beginning one.
        least_interval_s: a series gets at most one point in so many seconds of the run.

    Raises:
        ImportError: aim is missing; the message names the extra that brings it.
    """

    def __init__(
        self,
        repo: str | os.PathLike[str],
        experiment: str,
        run_name: str,
        config: Mapping[str, Any] | None = None,
        *,
        run_hash: str | None = None,
        least_interval_s: float = 2.0,
        most_queued: int = MOST_QUEUED,
    ) -> None:
        if importlib.util.find_spec("aim") is None:
            raise ImportError(MISSING)
        self.run_hash = run_hash
        self.dropped = 0
        self.failure: str | None = None  # why nothing more is written
        self._repo, self._experiment, self._run_name = Path(repo), experiment, run_name
        self._config = dict(config or {})
        self._points = Points(least_interval_s)
        self._queue: deque[Event] = deque(maxlen=most_queued)
        self._wake = threading.Condition()
        self._closing = False
        self._last: tuple[Mapping[str, Any] | None, list[Path]] = (None, [])
        # a daemon: an exit without close() must not wait for the disk
        self._thread = threading.Thread(target=self._main, name="aim-log", daemon=True)
        self._thread.start()

    def event(self, record: Event) -> None:
        """Take a tape event; never waits for Aim."""
        with self._wake:
            self.dropped += len(self._queue) == self._queue.maxlen
            self._queue.append(record)
            self._wake.notify()

    def close(
        self,
        summary: Mapping[str, Any] | None = None,
        figures: Iterable[str | os.PathLike[str]] = (),
        timeout_s: float = 15.0,
    ) -> str | None:
        """Write what is queued, the summary and the figures; return the run's hash.

        After `timeout_s` the rest is given up, with a warning.
        """
        with self._wake:
            self._last = (summary, [Path(figure) for figure in figures])
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("Aim has not taken all events after %g s; the rest is given up", timeout_s)
        if self.dropped:
            log.warning("%d events were not written to Aim: it was too slow", self.dropped)
        return self.run_hash

    def _main(self) -> None:
        """The thread. Whatever Aim throws ends the dashboard, not the run."""
        run = None
        try:
            run = self._open()
            while (event := self._next()) is not None:
                self._track(run, event)
            self._finish(run)
        except Exception as error:
            self.failure = f"{type(error).__name__}: {error}"
            log.warning("Aim failed and gets nothing more of this run: %s", self.failure)
        finally:
            if run is not None:
                run.close()

    def _open(self) -> Run:
        from aim import Run

        run = Run(
            run_hash=self.run_hash,
            repo=str(self._repo),
            experiment=self._experiment,
            system_tracking_interval=None,
            log_system_params=False,
            capture_terminal_logs=False,
        )
        run.name = self._run_name
        if self._config:
            run["config"] = self._config
        self.run_hash = run.hash
        return run

    def _next(self) -> Event | None:
        """The oldest event; None once closed and empty."""
        with self._wake:
            self._wake.wait_for(lambda: self._queue or self._closing)
            return self._queue.popleft() if self._queue else None

    def _track(self, run: Run, event: Event) -> None:
        for point in self._points.of(event):
            run.track(point.value, name=point.name, step=point.step, context=point.context)

    def _finish(self, run: Run) -> None:
        summary, figures = self._last
        if summary is not None:
            run["summary"] = dict(summary)
        if figures:
            from aim import Image

            for path in figures:
                run.track(Image(str(path)), name=path.stem, step=0, context={"report": "figure"})
