"""Figures of a run (matplotlib, drawn without a display and without its global state)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dd_lightning.report.series import Series
from dd_lightning.report.style import (
    BLUE,
    GREY,
    ORANGE,
    draw_empty,
    house_style,
    new_figure,
    save_figure,
    time_axis,
)
from dd_lightning.report.timeline import draw_timeline
from dd_lightning.report.tokens import Tokens
from dd_lightning.report.where_lost import draw_tokens_lost

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = (
    "loss_tokens",
    "loss_time",
    "timeline",
    "bytes_per_second",
    "contributors",
    "tokens_lost",
)
NO_CONTRIBUTIONS = ("contributors",)  # figures that a data-parallel run does not have


def write_figures(
    folder: str | os.PathLike[str], series: Series, tokens: Tokens, summary: Mapping[str, Any]
) -> list[Path]:
    """Write all figures of a run into `folder` and return their paths, in the report's order.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        left_out = NO_CONTRIBUTIONS if series.steps else ()
        names = [name for name in NAMES if name not in left_out]
        return [_write(name, folder, series, tokens, summary) for name in names]


def _write(
    name: str, folder: Path, series: Series, tokens: Tokens, summary: Mapping[str, Any]
) -> Path:
    if name == "timeline":
        figure = draw_timeline(series)
    else:
        figure, axes = new_figure()
        if name.startswith("loss"):
            _draw_loss(axes, series, against=name.removeprefix("loss_"))
        elif name == "bytes_per_second":
            _draw_bytes(axes, series)
        elif name == "contributors":
            _draw_contributors(axes, series, summary)
        else:
            draw_tokens_lost(axes, tokens, summary)
    return save_figure(figure, folder / f"{name}.png")


def _draw_loss(axes: Axes, series: Series, *, against: str) -> None:
    """Validation loss of Θ against merged tokens or seconds since the run's start."""
    if against == "tokens":
        points = [(one.tokens, one.loss) for one in series.evaluated if one.tokens is not None]
        axes.set_xlabel("tokens merged into Θ")
        axes.xaxis.set_major_formatter(engineering())
    else:
        points = [(one.at_s, one.loss) for one in series.evaluated]
        time_axis(axes)
    axes.set_ylabel("validation loss of Θ")
    if not points:
        draw_empty(axes, "no evaluation on the tape")
        return
    xs, ys = zip(*sorted(points), strict=True)
    axes.plot(xs, ys, color=BLUE, marker="o", markersize=6 if len(xs) < 60 else 0)
    axes.annotate(
        f"{ys[-1]:.3f}",
        (xs[-1], ys[-1]),
        xytext=(-4, 10),
        textcoords="offset points",
        ha="right",
    )


def _draw_bytes(axes: Axes, series: Series) -> None:
    """What all learners together sent and received."""
    begins, up, down = series.byte_rates()
    time_axis(axes)
    axes.set_ylabel("bytes per second")
    axes.yaxis.set_major_formatter(engineering("B/s"))
    if not series.transfers:
        draw_empty(axes, "no bytes on the tape")
        return
    edges = [*begins, 2 * begins[-1] - begins[-2] if len(begins) > 1 else begins[-1] + 2.0]
    for rates, colour, line, label in (
        (up, BLUE, "-", "all learners, up"),
        (down, ORANGE, "--", "down"),  # dashed: where both are equal neither hides the other
    ):
        axes.stairs(rates, edges, color=colour, linestyle=line, linewidth=2.5, label=label)
    axes.set_ylim(bottom=0, top=1.25 * max(*up, *down))
    axes.legend(loc="upper right", ncols=2)


def _draw_contributors(axes: Axes, series: Series, summary: Mapping[str, Any]) -> None:
    """How many learners each merge had; a running mean says what the dots hide."""
    time_axis(axes)
    axes.set_ylabel("contributors of a merge")
    if not series.merges:
        draw_empty(axes, "no merge on the tape")
        return
    merges = sorted(series.merges, key=lambda merge: merge.at_s)
    times = [merge.at_s for merge in merges]
    counts = [merge.contributors for merge in merges]
    thin = max(1, len(merges) // 2000)
    axes.plot(
        times[::thin],
        counts[::thin],
        linestyle="none",
        marker="o",
        markersize=5,
        color=GREY,
        alpha=0.5,
        label="one merge" if thin == 1 else f"one merge ({thin}th part shown)",
    )
    width = max(1, len(merges) // 20)
    axes.plot(
        times[width - 1 :],
        _running_mean(counts, width),
        color=BLUE,
        linewidth=2.5,
        label=f"mean of {width}",
    )
    top = max(summary["learners"], *counts)
    axes.axhline(summary["learners"], color=ORANGE, linestyle="--", label="learners planned")
    axes.set_ylim(0, 1.3 * top)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="upper right", ncols=3)


def _running_mean(values: Sequence[int], width: int) -> list[float]:
    """Means of `width` consecutive values: len(values) - width + 1 of them."""
    total = sum(values[: width - 1])
    means = []
    for index in range(width - 1, len(values)):
        total += values[index]
        means.append(total / width)
        total -= values[index - width + 1]
    return means


def engineering(unit: str = "") -> Any:
    """Numbers on an axis as 1 k, 2.5 M."""
    from matplotlib.ticker import EngFormatter

    return EngFormatter(unit, sep=" " if unit else "")
