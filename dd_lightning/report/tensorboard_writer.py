"""A run as TensorBoard event files: `tensorboard --logdir outputs` (or multirun) shows all runs.

Each process that writes adds a file to the run's folder; TensorBoard reads them as one run. Points
are dated by the run's own clock, in virtual time too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dd_lightning.report.points import Context, Note, Point
from dd_lightning.report.run_log import About

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FOLDER = "tensorboard"  # in the run's


class TensorBoardWriter:
    """Implements `run_log.Writer`."""

    def __init__(self) -> None:
        self._writer: SummaryWriter | None = None
        self._began_wall_s = 0.0

    def begin(self, about: About, key: str | None) -> str:
        """Key: the folder's name."""
        from torch.utils.tensorboard import SummaryWriter

        self._began_wall_s = about.began_wall_s
        self._writer = SummaryWriter(str(about.folder / FOLDER))
        if key is None:
            self._text("run", {"id": about.run_id, "tags": list(about.tags)}, 0.0)
            self._text("hparams", about.hparams, 0.0)
            self._text("config", about.config, 0.0)
        return FOLDER

    @property
    def _opened(self) -> SummaryWriter:
        assert self._writer is not None  # begin() comes first
        return self._writer

    def points(self, points: Sequence[Point], at_s: float) -> None:
        """Tags are `name/context`: `train_loss/learner 0`."""
        wall_s = self._began_wall_s + at_s
        for point in points:
            tag = tag_of(point.name, point.context)
            self._opened.add_scalar(tag, point.value, point.step, wall_s)

    def note(self, note: Note) -> None:
        """A text at its second."""
        at_s = note.at_s
        self._opened.add_text(
            f"events/{note.kind}",
            f"{at_s:.1f} s: {note.text}",
            int(at_s),
            self._began_wall_s + at_s,
        )

    def end(self, summary: Mapping[str, Any], figures: Sequence[Path]) -> None:
        """The summary as a text, figures as images."""
        import numpy as np
        from PIL import Image

        self._text("summary", summary, summary["seconds"])
        for path in figures:
            pixels = np.asarray(Image.open(path).convert("RGB"))
            self._opened.add_image(f"figures/{path.stem}", pixels, 0, dataformats="HWC")

    def _text(self, tag: str, values: Mapping[str, Any], at_s: float) -> None:
        text = yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True)
        indented = "".join(f"    {line}\n" for line in text.splitlines())  # Markdown's code
        self._opened.add_text(tag, indented, int(at_s), self._began_wall_s + at_s)

    def close(self) -> None:
        """Writes out."""
        if self._writer is not None:
            self._writer.close()


def tag_of(name: str, context: Context) -> str:
    """One flat name for a series: `bytes_up/learner 0`, `validation_loss/validation`."""
    parts = [
        str(value) if key in ("subset", "process") else f"{key} {value}"
        for key, value in context.items()
    ]
    return "/".join((name, *parts))
