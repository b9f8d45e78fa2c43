"""How every figure looks: colours that colour-blind readers tell apart (Okabe and Ito), type that
stays legible at half width, axes with units."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#8A8A8A"
INK, PALE = "#222222", "#E3E3E3"
BROWN, BLACK, PAPER = "#7A3B00", "#000000", "#FFFFFF"
LINES = tuple(zip((BLUE, ORANGE, GREEN, RED, PURPLE, SKY, INK), "os^DvPX", strict=True))

# What each colour is on a dark page, in the same order of hue: light enough to be read there, and
# those that lanes are filled with dark enough for the light ink on them.
DARK = {
    INK: "#E7EAEE",
    BLACK: "#E7EAEE",
    PAPER: "#1D2228",
    PALE: "#3A424B",
    GREY: "#A3ADB8",
    BLUE: "#74BDF2",
    ORANGE: "#F2B134",
    GREEN: "#2FB38C",
    RED: "#E8743B",
    SKY: "#4193C8",
    PURPLE: "#E6A3CB",
    YELLOW: "#B9AD2F",
    BROWN: "#C08A5B",
}

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
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 2.0,
    "savefig.dpi": 120,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "path",  # the same on every machine, and no text of a run in the file
    "svg.hashsalt": "dd_lightning",  # the same file for the same run
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


def save_figure(figure: Figure, path: Path) -> Path:
    """Save a PNG, and beside it an SVG that follows the reader's light or dark colours."""
    figure.savefig(path)
    figure.set_layout_engine("none")  # as the PNG has it
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    path.with_suffix(".svg").write_text(follow_reader(text.getvalue()))
    return path


def follow_reader(svg: str) -> str:
    """The drawing with colours as variables that `prefers-color-scheme` sets."""
    for light in DARK:
        svg = svg.replace(light.lower(), f"var(--{light[1:]})")
    light = ";".join(f"--{one[1:]}:{one}" for one in DARK)
    dark = ";".join(f"--{one[1:]}:{other}" for one, other in DARK.items())
    style = f"<style>:root{{{light}}}@media(prefers-color-scheme:dark){{:root{{{dark}}}}}</style>"
    start = svg.index(">", svg.index("<svg")) + 1
    return svg[:start] + style + svg[start:]


def time_axis(axes: Axes) -> None:
    """Seconds since the run's start."""
    axes.set_xlabel("time since the run's start (s)")


def draw_empty(axes: Axes, text: str) -> None:
    """Say why there is nothing to see."""
    axes.text(0.5, 0.5, text, ha="center", va="center", transform=axes.transAxes, color=GREY)
    axes.set_xticks([])
    axes.set_yticks([])
