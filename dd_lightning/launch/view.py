"""What the user sees during a run: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, Protocol, Self

from dd_lightning.launch.settings import Settings

LINE_EVERY_S = 5.0


class View(Protocol):
    """Used as a context manager around a run."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, text: str) -> None:
        """Show a message that stays."""

    def refresh(self) -> None:
        """Show the run as it is now; called ten times a second."""


class PlainView:
    """One line every few seconds, from `syncer/status.json`."""

    def __init__(self, folder: Path) -> None:
        self._status = folder / "syncer" / "status.json"
        self._due = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def refresh(self) -> None:
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + LINE_EVERY_S
        if self._status.exists():
            print(status_line(json.loads(self._status.read_text())), flush=True)


def status_line(status: dict[str, Any]) -> str:
    """`  12 s  round 40  learners 0: training 120, 1: training 118`."""
    learners = ", ".join(
        f"{name}: {state.get('state')} {state.get('step')}"
        for name, state in status.get("learners", {}).items()
    )
    return f"{status.get('t_s', 0):6.0f} s  round {status.get('round')}  learners {learners}"


def open_view(settings: Settings, folder: Path) -> View:
    """A live table where stdout is a terminal, else plain lines."""
    if sys.stdout.isatty():
        raise NotImplementedError
    return PlainView(folder)
