"""The evaluator of a simulated run: the real one, at the same times of the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dd_lightning.launch.evaluator import INITIAL, Evaluator
from dd_lightning.simulate.random_state import RandomState
from dd_lightning.syncer.checkpoint import checkpoints


@dataclass(slots=True)
class Evaluations:
    """Evaluates when it is told to; draws random numbers of its own.

    Args:
        values: the resolved configuration of the run.
    """

    values: dict[str, Any]
    folder: Path
    _evaluator: Evaluator | None = None
    _done: Path | None = None
    _random: RandomState = field(default_factory=RandomState.current)

    def newest(self, final: bool = False) -> None:
        """Evaluate the newest checkpoint, or version 0 first."""
        found = checkpoints(self.folder / "syncer")
        if not found:
            return
        if self._done is None and found[-1].name.endswith(INITIAL):
            self._evaluate(found[-1], initial=True, final=False)
        if found[0] != self._done or final:
            self._evaluate(found[0], initial=False, final=final)

    def _evaluate(self, file: Path, initial: bool, final: bool) -> None:
        ours = RandomState.current()
        self._random.restore()
        if self._evaluator is None:
            self._evaluator = Evaluator(self.values, self.folder)
        self._evaluator.evaluate(file, initial, final)
        self._done = file
        self._random = RandomState.current()
        ours.restore()
