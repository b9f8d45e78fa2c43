"""What `goodput` prints and draws."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dd_lightning.simulate.goodput import Fleet, FleetRow
from dd_lightning.simulate.paper_table import errors, paper_value

PLOTS = (".png", ".pdf", ".svg")


def show(rows: Sequence[FleetRow], with_paper: bool) -> None:
    """Goodput and uptime, a line for each number of learners."""
    chips = sorted({row.chips for row in rows})
    print(
        "goodput in % (uptime in %" + ("; the paper's goodput after |" if with_paper else "") + ")"
    )
    print("learners".ljust(20) + "".join(f"{count:>20,}" for count in chips))
    for key in dict.fromkeys((row.learners, row.elastic) for row in rows):
        name = str(key[0]) + ("" if key[0] > 1 else ", elastic" if key[1] else ", no elasticity")
        cells = {row.chips: row for row in rows if (row.learners, row.elastic) == key}
        print(name.ljust(20) + "".join(_cell(cells[count], with_paper) for count in chips))
    if with_paper:
        mean, largest = errors(list(rows))
        print(f"difference to the paper: mean {mean:.2f} points, largest {largest:.2f}")


def _cell(row: FleetRow, with_paper: bool) -> str:
    text = f"{row.goodput:.1f} ({row.uptime:.1f})"
    return (f"{text} | {paper_value(row)}" if with_paper else text).rjust(20)


def show_rounds(fleets: Sequence[Fleet]) -> None:
    """Rounds of each row and how many contributed."""
    for fleet in fleets:
        if fleet.rounds is not None:
            print(
                f"{fleet.row.learners} learners, {fleet.row.chips:,} chips: {fleet.rounds.rounds} "
                f"rounds, {fleet.rounds.contributors:.2f} contributors on average"
            )


def show_others(found: dict[str, Any]) -> None:
    """The paper's heterogeneous and scavenging results beside ours."""
    print(
        "\nfour learners, and four 18% slower with 10% jitter: goodput in %, contributors a round"
    )
    for name, row in found["heterogeneous"].items():
        print(
            f"  {name:<24} {row['goodput']:>6.1f} (paper: {row['paper']})"
            f"{row['contributors']:>6.1f}"
        )
    print("\ntemporary chips from the middle of the run on: wall time, decoupled and data-parallel")
    for extra, row in found["scavenging"].items():
        print(
            f"  +{100 * float(extra):.0f}%".ljust(10)
            + f"{row['decoupled']:.2f} (paper: {row['paper']:.2f})   "
            f"{row['data_parallel']:.2f} (paper: {row['paper_data_parallel']:.2f})"
        )


def check_plot(path: Path) -> None:
    """Refuse a figure that could not be written, before anything is simulated.

    Raises:
        ValueError: its folder or its format does not exist, or matplotlib.
    """
    if path.suffix not in PLOTS or not path.parent.is_dir():
        raise ValueError(
            f"--plot is {str(path)!r}; allowed: a file in an existing folder, named "
            f"{' | '.join('*' + suffix for suffix in PLOTS)}."
        )
    try:
        import matplotlib  # noqa: F401 (whether it is there)
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib; install it with `pip install 'dd-lightning[kit]'`."
        ) from None


def plot(rows: Sequence[FleetRow], path: Path) -> None:
    """Goodput over chips, a line for each number of learners."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for learners, elastic in dict.fromkeys((row.learners, row.elastic) for row in rows):
        own = [row for row in rows if (row.learners, row.elastic) == (learners, elastic)]
        name = f"{learners} learner" + ("s" if learners > 1 else "" if elastic else ", rigid")
        axes.plot([row.chips for row in own], [row.goodput for row in own], "o-", label=name)
    axes.set(xscale="log", xlabel="chips", ylabel="goodput, %", ylim=(0, 101))
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")
    plt.close(figure)
    print(f"figure: {path}", file=sys.stderr)
