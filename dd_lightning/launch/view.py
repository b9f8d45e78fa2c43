"""What the user sees during a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
from rich.console import Console
from rich.live import Live

from dd_lightning.report.live import plain_line, render
from dd_lightning.report.read import EVALUATIONS, read_evaluations

LINE_EVERY_S = 5.0
TABLE_EVERY_S = 0.5


class View(Protocol):
    """Used as a context manager around a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def refresh(self) -> None:
        """Show the run as it is now; called ten times a second."""


class _Status:
    """The syncer's newest status with the evaluator's newest loss, at most every `every_s`."""

    def __init__(self, folder: Path, every_s: float) -> None:
        self._status = folder / "syncer" / "status.json"
        self._evaluations = folder / EVALUATIONS
        self._every_s = every_s
        self._due = 0.0

    def when_due(self) -> dict[str, Any] | None:
        if time.monotonic() < self._due or not self._status.exists():
            return None
        self._due = time.monotonic() + self._every_s
        status = msgspec.json.decode(self._status.read_bytes(), type=dict[str, Any])
        if self._evaluations.exists():
            for evaluation in read_evaluations(self._evaluations):
                status["validation_loss"] = evaluation["loss"]
        return status


class PlainView:
    """One line every few seconds."""

    def __init__(self, folder: Path) -> None:
        self._status = _Status(folder, LINE_EVERY_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def refresh(self) -> None:
        if (status := self._status.when_due()) is not None:
            self.say(plain_line(status))


class TableView:
    """A table that is redrawn in place; messages scroll above it."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._status = _Status(folder, TABLE_EVERY_S)
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def refresh(self) -> None:
        if (status := self._status.when_due()) is not None:
            self._live.update(render(status), refresh=True)


def open_view(folder: Path) -> View:
    """A table where stdout is a terminal, plain lines elsewhere."""
    return TableView(folder, Console()) if sys.stdout.isatty() else PlainView(folder)
