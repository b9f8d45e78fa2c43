"""A run as a folder of Weights & Biases, offline: nothing is sent, and no account is needed.

`wandb sync RUN/wandb/offline-run-*` uploads it. A process that goes on with the run adds a folder
with the same run id: give all of them, with `--append`.
"""

from __future__ import annotations

import os
import uuid
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dd_lightning.report.points import Note, Point
from dd_lightning.report.run_log import About
from dd_lightning.report.tensorboard_writer import tag_of

if TYPE_CHECKING:
    from wandb import Run

MOST_TAG = 64  # characters that wandb takes


class WandbWriter:
    """Implements `run_log.Writer`.

    Args:
        project: W&B's name for runs that belong together.
    """

    def __init__(self, project: str) -> None:
        self._project = project
        self._run: Run | None = None
        self._axes: set[tuple[str, str]] = set()

    def begin(self, about: About, key: str | None) -> str:
        """Key: the run's id, the same in each process that goes on with it."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # wandb's own, read at its import
        import wandb

        key = key or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=self._project,
            id=key,
            name=f"{about.folder.name} {about.run_id}",
            dir=str(about.folder),
            config={"config": dict(about.config), "hparams": dict(about.hparams)},
            tags=[tag[:MOST_TAG] for tag in about.tags],
            reinit="create_new",  # several runs in one process, as a simulated sweep makes
            settings=wandb.Settings(
                mode="offline",
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                disable_job_creation=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        return key

    @property
    def _opened(self) -> Run:
        assert self._run is not None  # begin() comes first
        return self._run

    def points(self, points: Sequence[Point], at_s: float) -> None:
        """Rows of `name/context`, each beside what its steps count: learners' steps differ."""
        rows: defaultdict[tuple[str, int], dict[str, float]] = defaultdict(dict)
        for point in points:
            tag = tag_of(point.name, point.context)
            if (tag, point.axis) not in self._axes:
                self._axes.add((tag, point.axis))
                self._opened.define_metric(tag, step_metric=f"axis/{point.axis}")
            rows[point.axis, point.step][tag] = point.value
        for (axis, step), row in rows.items():
            self._opened.log({**row, f"axis/{axis}": step, "axis/run_seconds": at_s})

    def note(self, note: Note) -> None:
        """A row with a text."""
        text = f"{note.at_s:.1f} s: {note.text}"
        self._opened.log({f"events/{note.kind}": text, "axis/run_seconds": note.at_s})

    def end(self, summary: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """The summary beside the newest values, figures as images."""
        import wandb

        self._opened.summary.update({"summary": dict(summary)})
        if figures:
            images = {f"figures/{path.stem}": wandb.Image(str(path)) for path in figures}
            self._opened.log(images)

    def close(self) -> None:
        """Writes out."""
        if self._run is not None:
            self._run.finish()
