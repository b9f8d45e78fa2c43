"""One figure of who computes, waits and sends, a panel for each value that was swept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from dd_lightning.report.read import read_events
from dd_lightning.report.step_spans import Lane, Lanes, Span
from dd_lightning.report.study import Study, StudyRun
from dd_lightning.report.style import ORANGE, PALE, PAPER, SKY, import_figure, time_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TALL, THIN = 0.5, 0.2  # of a lane: computing or waiting, sending below


def draw_timelines(study: Study, window: tuple[float, float]) -> Figure:
    """The first run of each group, between two moments of the run.

    Raises:
        ValueError: a run kept no record of its steps.
    """
    groups = [group for group in study.groups if group.runs]
    figure = import_figure()(figsize=(8.0, 1.2 + 1.9 * len(groups)))
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False)[:, 0]
    for panel, group in zip(panels, groups, strict=True):
        _draw_lanes(panel, lanes_of(group.runs[0]))
        panel.set_title(str(group.settings.get(study.x, "")).replace("_", " "), loc="left", size=14)
    panels[0].set_xlim(*window)
    time_axis(panels[-1])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)
    return figure


def lanes_of(run: StudyRun) -> dict[str, Lane]:
    """Of a simulated run with `launcher.step_log`."""
    lanes = Lanes(run.config, run.summary)
    for event in read_events(run.folder):
        lanes.feed(event)
    return lanes.lanes(run.folder)


def _draw_lanes(axes: Axes, lanes: Mapping[str, Lane]) -> None:
    for place, lane in enumerate(lanes.values()):
        first, last = lane.computing[0].began_s, lane.computing[-1].ended_s
        label = place == 0
        _bars(axes, [Span(first, last)], place, TALL, PALE, "waits" if label else "")
        _bars(axes, lane.computing, place, TALL, SKY, "computes" if label else "")
        _bars(axes, lane.sending, place + 0.4, THIN, ORANGE, "sends" if label else "")
    axes.set_yticks(range(len(lanes)), [f"learner {name}" for name in lanes])
    axes.set_ylim(len(lanes) - 0.3, -0.5)
    axes.grid(visible=False)


def _bars(
    axes: Axes, spans: list[Span] | tuple[Span, ...], place: float, height: float, colour: str,
    label: str,
) -> None:  # fmt: skip
    axes.broken_barh(
        [(span.began_s, span.ended_s - span.began_s) for span in spans],
        (place - height / 2, height),
        facecolor=colour,
        edgecolor=colour if height == THIN else PAPER,
        linewidth=0.6,
        label=label or None,
    )
