"""Figure of what a loss costs: final validation loss against time, bytes and faults of a study's
groups, and the front of those that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dd_lightning.report.study import Group, Study, short
from dd_lightning.report.study_measures import COSTS, LOSS, MEASURES
from dd_lightning.report.style import GREY, INK, LINES, import_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARETO = "pareto.png"
MORE_IS_BETTER = ("faults",)  # that a setting withstood
MOST_NAMED = 12  # groups; of more only those of the front are named
PANEL = 3.4  # in


@dataclass(frozen=True, slots=True)
class Point:
    """Means of a group, as shown."""

    group: Group
    cost: float
    loss: float


def points(study: Study, cost: str) -> list[Point]:
    """Of the groups that have both measures."""
    found = []
    for group in study.groups:
        own, loss = group.measures[cost], group.measures[LOSS]
        if own is not None and loss is not None:
            found.append(Point(group, own.mean * MEASURES[cost].scale, loss.mean))
    return found


def front(found: Sequence[Point], cost: str) -> list[Point]:
    """Those that no other beats in one of the two and equals in the other, by rising cost."""
    sign = -1.0 if cost in MORE_IS_BETTER else 1.0
    best: list[Point] = []
    for point in sorted(found, key=lambda one: (sign * one.cost, one.loss)):
        if not best or point.loss < best[-1].loss:
            best.append(point)
    return best[:: int(sign)]


def costs_of(study: Study) -> list[str]:
    """Those that differ among the groups: where nobody met a fault there is nothing to compare."""
    kept = []
    for cost in COSTS:
        values = {point.cost for point in points(study, cost)}
        if len(values) > 1:
            kept.append(cost)
    return kept


def write_pareto(folder: Path, study: Study) -> list[Path]:
    """Write `pareto.png`; nothing where no two groups differ in loss and in a cost."""
    costs = costs_of(study)
    if not costs:
        return []
    figure = import_figure()(figsize=(8.0, 0.6 + PANEL * len(costs)))
    for axes, cost in zip(figure.subplots(len(costs), 1, squeeze=False)[:, 0], costs, strict=True):
        _draw(axes, study, cost)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return [save_figure(figure, folder / PARETO)]


def _draw(axes: Axes, study: Study, cost: str) -> None:
    found = points(study, cost)
    best = front(found, cost)
    lines = list(dict.fromkeys(study.line_of(group) for group in study.groups))
    _draw_front(axes, best, cost)
    named = found if len(found) <= MOST_NAMED else best
    seen: set[str] = set()
    for point in found:
        line = study.line_of(point.group)
        colour, marker = LINES[lines.index(line) % len(LINES)]
        spread = point.group.measures[LOSS]
        label = None if line in seen or len(lines) == 1 else line
        seen.add(line)
        axes.errorbar(
            point.cost,
            point.loss,
            yerr=(spread.std or 0.0) if spread else 0.0,
            color=colour,
            marker=marker,
            markersize=10 if point in best else 7,
            markeredgecolor=INK if point in best else colour,
            linestyle="none",
            label=label,
        )
        if point in named and study.x:
            text = str(point.group.settings[study.x]).replace("_", " ")
            place, above = (point.cost, point.loss), lines.index(line) % 2 == 0
            offset = (8, 6 if above else -16)  # of two lines, whose points often lie close
            axes.annotate(text, place, xytext=offset, textcoords="offset points", fontsize=12)
    axes.set_xlabel(MEASURES[cost].label + (", of a run" if cost != "seconds" else ""))
    axes.set_ylabel("validation loss of Θ")
    axes.margins(x=0.12, y=0.15)
    if study.x:
        axes.set_title(f"named by {short(study.x)}".replace("_", " "), loc="right", fontsize=12)


def _draw_front(axes: Axes, best: Sequence[Point], cost: str) -> None:
    """A staircase: left and below it (right and below, of faults) lies nobody."""
    where = "pre" if cost in MORE_IS_BETTER else "post"
    axes.step(
        [point.cost for point in best],
        [point.loss for point in best],
        where=where,
        color=GREY,
        linestyle="--",
        label="front: none is better in both",
        zorder=1,
    )
