"""The timeline: who trained when, who contributed to what, how long rounds took, versions of Θ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dd_lightning.report.series import (
    AWAY,
    HANDING_IN,
    PAUSED,
    STEPPING,
    MergePoint,
    Series,
    Stretch,
)
from dd_lightning.report.steps import draw_step_durations, draw_step_numbers
from dd_lightning.report.style import (
    BLUE,
    GREEN,
    INK,
    ORANGE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    draw_empty,
    new_figure,
    time_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANE_COLOURS = {STEPPING: SKY, PAUSED: YELLOW, HANDING_IN: GREEN, AWAY: RED}
MOST_ROUNDS = 120  # whose contributions are drawn one by one; more would be a grey bar
MOST_BARS = 600  # rounds whose duration is drawn
MOST_LANES = 16


def draw_timeline(series: Series) -> Figure:
    """Lanes of learners above, time to quorum and grace of rounds, versions of Θ below."""
    lanes = dict(list(series.lanes().items())[:MOST_LANES])
    tall = max(1.2, 0.42 * len(lanes))
    figure, (top, middle, bottom) = new_figure((tall, 1.5, 1.3), height=tall + 4.6)
    _draw_lanes(top, lanes, series)
    if series.steps:
        draw_step_durations(middle, series.steps)
        draw_step_numbers(bottom, series.steps)
    else:
        _draw_rounds(middle, series.merges)
        _draw_versions(bottom, series.merges)
    time_axis(bottom)
    for axes in (top, middle):
        axes.tick_params(axis="x", labelbottom=False)
    figure.align_ylabels()
    return figure


def _draw_lanes(axes: Axes, lanes: dict[str, list[Stretch]], series: Series) -> None:
    if not lanes:
        draw_empty(axes, "no learner came")
        return
    used: set[str] = set()
    every = max(1, -(-len(series.merges) // MOST_ROUNDS))
    for row, (learner, stretches) in enumerate(lanes.items()):
        for state, colour in LANE_COLOURS.items():
            thinnest = series.end_s / 250 if state == AWAY else 0.0  # short absences must show
            spans = [
                (one.begin_s, max(thinnest, one.end_s - one.begin_s))
                for one in stretches
                if one.state == state
            ]
            label = None if state in used or not spans else state
            axes.broken_barh(spans, (row - 0.36, 0.72), color=colour, linewidth=0, label=label)
            used |= {state} if spans else set()
        arrivals = series.contributed.get(learner, [])
        times = [at_s for at_s, number in arrivals if number % every == 0]
        axes.vlines(times, row - 0.22, row + 0.22, color=INK, linewidth=1.2)
    if any(series.contributed.values()):
        label = "contribution" if every == 1 else f"contribution (1 round in {every})"
        axes.plot([], [], "|", markersize=12, markeredgewidth=1.5, color=INK, label=label)
    _draw_faults(axes, list(lanes), series)
    axes.set_yticks(range(len(lanes)), [_short(learner) for learner in lanes])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_ylabel("learner")
    axes.grid(visible=False)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=6, columnspacing=1.0, handlelength=1.2
    )


def _draw_faults(axes: Axes, learners: list[str], series: Series) -> None:
    """A mark in the lane of each fault's learner; a line through all for the syncer's."""
    fired = [one for one in series.faults.list() if one.at_s is not None][:MOST_ROUNDS]
    marks = [(one.at_s, learners.index(one.target)) for one in fired if one.target in learners]
    if marks:
        times, rows = zip(*marks, strict=True)
        style = {"markersize": 12, "color": PURPLE, "markeredgecolor": INK, "clip_on": False}
        axes.plot(times, rows, "X", label="fault", **style)
    across = [one.at_s for one in fired if one.target not in learners]
    for index, at_s in enumerate(across):
        label = None if index or marks else "fault"
        axes.axvline(at_s, color=PURPLE, linestyle="--", linewidth=2, label=label)
    for index, (at_s, _) in enumerate(series.faults.restarts[:MOST_ROUNDS]):
        label = None if index else "syncer restarts"
        axes.axvline(at_s, color=ORANGE, linestyle=":", linewidth=2, label=label)


def _draw_rounds(axes: Axes, merges: Sequence[MergePoint]) -> None:
    axes.set_ylabel("round (s)")
    if not merges:
        draw_empty(axes, "no merge")
        return
    shown = longest_of_bins(merges, MOST_BARS)
    times = [merge.at_s for merge in shown]
    quorum = [merge.quorum_s for merge in shown]
    total = [merge.quorum_s + merge.grace_s for merge in shown]
    axes.vlines(times, 0, quorum, color=BLUE, linewidth=1.5, label="opening to quorum")
    axes.vlines(times, quorum, total, color=ORANGE, linewidth=1.5, label="grace")
    axes.set_ylim(0, 1.45 * max(max(total), 1e-3))
    axes.legend(loc="upper right", ncols=2)


def _draw_versions(axes: Axes, merges: Sequence[MergePoint]) -> None:
    """Lowest and highest version among the fragments, over time."""
    axes.set_ylabel("version of Θ")
    if not merges:
        draw_empty(axes, "version 0")
        return
    ordered = sorted(merges, key=lambda merge: merge.at_s)
    versions = dict.fromkeys((merge.fragment for merge in ordered), 0)
    times, low, high = [0.0], [0], [0]
    for merge in ordered:
        versions[merge.fragment] = merge.version
        times.append(merge.at_s)
        low.append(min(versions.values()))
        high.append(max(versions.values()))
    axes.step(times, high, where="post", color=BLUE, label="newest fragment")
    axes.step(times, low, where="post", color=ORANGE, label="oldest fragment")
    axes.set_ylim(0, 1.5 * max(high))  # room for the legend
    axes.legend(loc="upper left", ncols=2)


def longest_of_bins(merges: Sequence[MergePoint], most: int) -> list[MergePoint]:
    """At most `most` merges: the longest round of each of as many equal groups, in order."""
    size = -(-len(merges) // most)
    groups = (merges[start : start + size] for start in range(0, len(merges), size))
    return [max(group, key=lambda merge: merge.quorum_s + merge.grace_s) for group in groups]


def _short(name: str) -> str:
    return name if len(name) <= 14 else f"{name[:13]}…"
