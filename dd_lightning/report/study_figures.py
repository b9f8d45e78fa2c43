"""Figures of a study: measures against what was swept, and loss against tokens, time and bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dd_lightning.report.figures import engineering
from dd_lightning.report.pareto import write_pareto
from dd_lightning.report.study import Group, Study, short
from dd_lightning.report.study_measures import measure_of, sent_at
from dd_lightning.report.study_timeline import draw_timelines
from dd_lightning.report.style import (
    LINES,
    draw_empty,
    house_style,
    import_figure,
    new_figure,
    save_figure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STUDY, CURVES, TIMELINE = "study.png", "curves.png", "timeline.png"
ENOUGH_POINTS = 4  # evaluations of a run that make a curve
AXES = ("tokens merged into Θ", "time since the run's start (s)", "bytes on the wire")


def write_study_figures(folder: Path, study: Study) -> list[Path]:
    """Write `study.png`, `pareto.png`, and `curves.png` where runs were evaluated often enough.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        drawn = study.plan.drawn
        figure, axes = new_figure((1.0,) * len(drawn), height=1.2 + 3.0 * len(drawn))
        panels = [axes] if len(drawn) == 1 else list(axes)
        for panel, name in zip(panels, drawn, strict=True):
            _draw_measure(panel, study, name, legend=panel is panels[0])
        panels[-1].set_xlabel(study.plan.x_label or axis_label(study.x or "run"))
        written = [save_figure(figure, folder / STUDY)]
        written += write_pareto(folder, study)
        if _has_curves(study):
            figure = import_figure()(figsize=(8.0, 10.0))
            for panel, what in zip(figure.subplots(3, 1), AXES, strict=True):
                _draw_curves(panel, study, what)
            written.append(save_figure(figure, folder / CURVES))
        if study.plan.timeline is not None:
            drawn_lanes = draw_timelines(study, study.plan.timeline)
            written.append(save_figure(drawn_lanes, folder / TIMELINE))
    return written


def axis_label(setting: str) -> str:
    """The setting's short name in words, with the unit that its ending says."""
    words = short(setting)
    for ending, unit in (("_ms", "ms"), ("_s", "s"), ("_mbit_s", "Mbit/s")):
        if words.endswith(ending):
            return f"{words.removesuffix(ending).replace('_', ' ')} ({unit})"
    return words.replace("_", " ")


def _draw_measure(axes: Axes, study: Study, name: str, legend: bool) -> None:
    """A dot for each run, a line through the means of each line of the study."""
    measure, places = measure_of(name), _places(study)
    axes.set_ylabel(measure.label)
    lines: dict[str, list[Group]] = {}
    for group in study.groups:
        lines.setdefault(study.line_of(group), []).append(group)
    for index, (line, groups) in enumerate(lines.items()):
        colour, marker = LINES[index % len(LINES)]
        xs, means = [], []
        for group in groups:
            x = places[_x_of(study, group)]
            dots = [one * measure.scale for one in group.values[name] if one is not None]
            axes.plot([x] * len(dots), dots, marker, color=colour, alpha=0.45, markersize=6)
            if (spread := group.measures[name]) is not None:
                xs.append(x)
                means.append(spread.mean * measure.scale)
        axes.plot(xs, means, color=colour, marker=marker, markersize=10, label=line or None)
    _x_ticks(axes, places)
    if legend and len(lines) > 1:
        axes.legend(loc="best", ncols=min(3, len(lines)))


def _x_of(study: Study, group: Group) -> Any:
    return group.settings[study.x] if study.x else ""


def _places(study: Study) -> dict[Any, float]:
    """Where each value of `x` stands: numbers in their order, at equal distances."""
    values = list(dict.fromkeys(_x_of(study, group) for group in study.groups))
    if all(isinstance(value, int | float) for value in values):
        values.sort()
    return {value: float(index) for index, value in enumerate(values)}


def _x_ticks(axes: Axes, places: dict[Any, float]) -> None:
    names = [str(value).replace("_", " ") for value in places]
    axes.set_xticks(list(places.values()), names)
    axes.set_xlim(-0.5, len(places) - 0.5)


def _has_curves(study: Study) -> bool:
    return all(
        len(run.facts.evaluated) >= ENOUGH_POINTS for group in study.groups for run in group.runs
    )


def _draw_curves(axes: Axes, study: Study, what: str) -> None:
    """Validation loss of every run; the runs of a group in one colour."""
    axes.set_xlabel(what)
    axes.set_ylabel("validation loss of Θ")
    if what != AXES[1]:
        axes.xaxis.set_major_formatter(engineering("B" if what == AXES[2] else ""))
    highest = -math.inf
    for index, group in enumerate(study.groups):
        colour, _ = LINES[index % len(LINES)]
        style = "-" if index < len(LINES) else "--"
        label = ", ".join(
            f"{short(name)} {value}"
            for name, value in group.settings.items()
            if name in study.swept
        )
        for number, run in enumerate(group.runs):
            points = [one for one in run.facts.evaluated if one.tokens is not None]
            xs = {
                AXES[0]: [one.tokens for one in points],
                AXES[1]: [one.at_s for one in points],
                AXES[2]: [sent_at(run.facts, one.at_s) for one in points],
            }[what]
            losses = [one.loss for one in points]
            highest = max([highest, *losses[1:2]])
            axes.plot(xs, losses, style, color=colour, label=None if number else label)
    if highest == -math.inf:
        draw_empty(axes, "no evaluation on the tapes")
        return
    axes.set_ylim(top=highest)  # the first evaluation is of untrained weights
    if what == AXES[0]:
        axes.legend(loc="upper right")
