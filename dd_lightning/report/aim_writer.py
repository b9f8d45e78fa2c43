"""A run in an Aim repository: one Aim run, with a context per learner and per fragment.

The repository is local: Aim on a network file system loses runs (Aim's issues 1865, 2869). Aim
dates points by the clock on the wall; `run_seconds` gives the run's own time of each round.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dd_lightning.report.points import Note, Point
from dd_lightning.report.run_log import About

if TYPE_CHECKING:
    from aim import Run

log = logging.getLogger(__name__)

OPEN_S = 60.0  # for other runs, of a sweep, to open the same repository first


class AimWriter:
    """Implements `run_log.Writer`.

    Args:
        repo: folder that holds (or will hold) `.aim`.
        experiment: Aim's name for runs that belong together.
    """

    def __init__(self, repo: str, experiment: str) -> None:
        self._repo, self._experiment = repo, experiment
        self._run: Run | None = None
        self._noted: set[tuple[str, int]] = set()  # kind and step of texts

    def begin(self, about: About, key: str | None) -> str:
        """Key: the Aim run's hash."""
        self._run = run = self._open(key)
        run.name = f"{about.folder.name} {about.run_id}"
        for tag in about.tags:
            if tag not in run.tags:
                run.add_tag(tag)
        if about.config:
            run["config"] = dict(about.config)
        if about.hparams:
            run["hparams"] = dict(about.hparams)
        run["run"] = {"id": about.run_id, "folder": about.folder.name}
        return run.hash

    def _open(self, key: str | None) -> Run:
        """One after another: of two that make a repository at once, one finds half of it and gives
        up."""
        from filelock import FileLock  # Aim brings it

        where = hashlib.sha256(os.path.realpath(self._repo).encode()).hexdigest()[:12]
        name = f"dd_lightning-aim-{os.getuid()}-{where}.lock"
        with FileLock(Path(tempfile.gettempdir()) / name, timeout=OPEN_S):
            return self._open_alone(key)

    def _open_alone(self, key: str | None) -> Run:
        """A killed process leaves its lock on the Aim run; ours on the run folder says that nobody
        else writes it, so that one which Aim still believes in is broken."""
        from aim import Run
        from aim.sdk.errors import MissingRunError, RunLockingError

        logging.getLogger("aim").setLevel(logging.WARNING)
        quiet: dict[str, Any] = {
            "repo": self._repo,
            "experiment": self._experiment,
            "system_tracking_interval": None,
            "log_system_params": False,
            "capture_terminal_logs": False,
        }
        try:
            return Run(run_hash=key, **quiet)
        except RunLockingError:
            return Run(run_hash=key, force_resume=True, **quiet)
        except MissingRunError:
            log.warning("the Aim run %s is no longer in %s: a new one begins", key, self._repo)
            return Run(**quiet)

    @property
    def _opened(self) -> Run:
        assert self._run is not None  # begin() comes first
        return self._run

    def points(self, points: Sequence[Point], at_s: float) -> None:
        """Aim shows them by step, and by the time at which they are written."""
        for point in points:
            self._opened.track(
                point.value, name=point.name, step=point.step, context=dict(point.context)
            )

    def note(self, note: Note) -> None:
        """A text at its millisecond, or the next free one: Aim keeps one text a step."""
        from aim import Text

        kind, step = "fault" if note.kind == "fault" else "course", int(1000 * note.at_s)
        while (kind, step) in self._noted:
            step += 1
        self._noted.add((kind, step))
        text = Text(f"{note.at_s:.1f} s: {note.text}")
        self._opened.track(text, name="events", step=step, context={"kind": kind})

    def end(self, summary: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """Figures as images, the summary as parameters."""
        from aim import Image

        self._opened["summary"] = dict(summary)
        for path in figures:
            image = Image(str(path), caption=path.stem.replace("_", " "))
            self._opened.track(image, name=path.stem, step=0, context={"report": "figure"})

    def close(self) -> None:
        """Marks it as ended in Aim."""
        if self._run is not None:
            self._run.close()
