"""Panels of a data-parallel run's timeline, where others have rounds and versions: its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dd_lightning.report.style import BLUE, ORANGE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 600  # steps whose duration is drawn


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One step that all members made."""

    at_s: float  # its end
    number: int
    compute_s: float  # of the slowest member
    reduce_s: float


def draw_step_durations(axes: Axes, steps: Sequence[StepPoint]) -> None:
    """What the slowest member computed, and the all-reduce on top of it."""
    size = -(-len(steps) // MOST_BARS)
    groups = (steps[start : start + size] for start in range(0, len(steps), size))
    shown = [max(group, key=lambda step: step.compute_s + step.reduce_s) for group in groups]
    times = [step.at_s for step in shown]
    compute = [step.compute_s for step in shown]
    total = [step.compute_s + step.reduce_s for step in shown]
    axes.set_ylabel("step (s)")
    axes.vlines(times, 0, compute, color=BLUE, linewidth=1.5, label="slowest member computes")
    axes.vlines(times, compute, total, color=ORANGE, linewidth=1.5, label="all-reduce")
    axes.set_ylim(0, 1.45 * max(max(total), 1e-3))
    axes.legend(loc="upper right", ncols=2)


def draw_step_numbers(axes: Axes, steps: Sequence[StepPoint]) -> None:
    """Steps in Θ over time; they fall where the job goes back to its checkpoint."""
    axes.set_ylabel("steps in Θ")
    times, numbers = [step.at_s for step in steps], [step.number for step in steps]
    axes.step([0.0, *times], [0, *numbers], where="post", color=BLUE)
    axes.set_ylim(0, 1.1 * max(numbers))
