"""How every figure looks: colours that colour-blind readers tell apart (Okabe and Ito), type that
stays legible at half width, axes with units."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#8A8A8A"
INK, PALE = "#222222", "#E3E3E3"

RC = {
    "font.size": 14,
    "axes.labelsize": 14,
    "legend.fontsize": 12,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": PALE,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "text.color": INK,
    "lines.linewidth": 2.0,
    "savefig.dpi": 120,
    "figure.constrained_layout.use": True,
}

MISSING = (
    "the figures of the report need matplotlib, which is not installed. "
    "Do: pip install 'dd-lightning[kit]'"
)


def import_figure() -> type[Figure]:
    """matplotlib's Figure, imported when the first figure is drawn.

    Raises:
        ImportError: it is missing; the message says what to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(MISSING) from error
    return Figure


@contextmanager
def house_style() -> Iterator[None]:
    """Draw and save within it: matplotlib looks its settings up at each call."""
    import_figure()
    from matplotlib import rc_context

    with rc_context(RC):
        yield


def new_figure(rows: tuple[float, ...] = (1.0,), height: float = 4.2) -> tuple[Figure, Any]:
    """A figure 8 in wide and its axes (an array of them for several `rows`, relative heights)."""
    figure = import_figure()(figsize=(8.0, height))
    return figure, figure.subplots(len(rows), 1, sharex=True, height_ratios=rows)


def time_axis(axes: Axes) -> None:
    """Seconds since the run's start."""
    axes.set_xlabel("time since the run's start (s)")


def draw_empty(axes: Axes, text: str) -> None:
    """Say why there is nothing to see."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])
