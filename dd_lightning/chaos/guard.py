"""When a fault may fire: after the syncer's first checkpoint, with enough of the run left.

A fault whose moment comes too early waits for the checkpoint. One for which too little time is left
does not fire any more, and a plan that asked for it fails the run: what it was to show was not
shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dd_lightning.syncer.checkpoint import checkpoints

NOT_BEFORE = ("first_checkpoint", "start")
VERSION_0 = "-0.ckpt"  # how the checkpoint of the initial values ends, which holds no work yet


@dataclass(frozen=True, slots=True)
class Guard:
    """`chaos.not_before` and `chaos.min_left_s`."""

    not_before: str = "first_checkpoint"
    min_left_s: float = 0.0

    def is_open(self, folder: Path) -> bool:
        """Whether the run in `folder` has come so far that faults may fire."""
        return self.not_before == "start" or has_checkpoint(folder)


def has_checkpoint(folder: Path) -> bool:
    """Whether the syncer of this run has written a checkpoint of merged work."""
    found = checkpoints(folder / "syncer")
    return any(not path.name.endswith(VERSION_0) for path in found)


@dataclass(slots=True)
class StepsLeft:
    """Estimates how long learners still train, from their steps over time.

    Args:
        least_step_s: no step is shorter (`launcher.step_floor_s`).
    """

    max_steps: int
    least_step_s: float
    made: int = 0  # steps of whoever was fastest, at each time, since the first report
    _first: dict[str, tuple[float, int]] = field(default_factory=dict)
    _last: dict[str, tuple[float, int]] = field(default_factory=dict)

    def saw(self, now_s: float, steps: Mapping[str, int]) -> None:
        """These learners have done so many steps; one whose count fell has begun anew."""
        gained = [step - self._last[name][1] for name, step in steps.items() if name in self._last]
        self.made += max(0, *gained) if gained else 0
        for learner, step in steps.items():
            if learner not in self._last or step < self._last[learner][1]:
                self._first[learner] = (now_s, step)
            if learner not in self._last or step != self._last[learner][1]:
                self._last[learner] = (now_s, step)

    def step_s(self, learner: str) -> float:
        """Mean duration of a step; the least one where none was measured."""
        if learner not in self._last:
            return self.least_step_s
        (began_s, first), (now_s, last) = self._first[learner], self._last[learner]
        measured = (now_s - began_s) / (last - first) if last > first else 0.0
        return max(self.least_step_s, measured)

    def seconds_left(self, learner: str | None = None) -> float:
        """Of one learner, or of the one that is done first; 0 where nothing is known yet."""
        if learner is not None:
            step = self._last.get(learner, (0.0, 0))[1]
            return max(0, self.max_steps - step) * self.step_s(learner)
        return min(map(self.seconds_left, self._last), default=0.0)
