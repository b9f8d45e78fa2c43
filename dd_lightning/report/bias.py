"""Table and figure of the study of bias: who pays where speed or failures go with the data."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dd_lightning.report.study import Group
from dd_lightning.report.style import GREY, LINES, house_style, new_figure, save_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OF_GROUPS = "validation_loss_"
HEAD = (
    *("rule", "learner 3", "its share of weight (%)", "length of Δ", "cosine", "bias", "spread"),
    *("its group's loss", "other groups' loss"),
)


@dataclass(frozen=True, slots=True)
class BiasRow:
    """One rule under one condition.

    Args:
        share: of learner 3 in the weight of a merge, 0 to 1, mean over merges.
        length, cosine, bias, spread: of the mean merge beside the reference's (`Moved`).
        own, others: final validation loss of learner 3's group, and the mean of the other groups',
            less the reference's of the same seed; by seed.
    """

    rule: str
    condition: str
    share: float
    length: float
    cosine: float
    bias: float
    spread: float
    own: tuple[float, ...]
    others: tuple[float, ...]


def losses_beside(group: Group, reference: Group, own: str) -> tuple[tuple[float, ...], ...]:
    """Final validation losses of a group of runs less those of the reference's runs, by seed: of
    the data group whose metric is `own`, and the mean over the other data groups."""
    usual, found = _losses(reference, own), _losses(group, own)
    pairs = [(a - usual[seed][0], b - usual[seed][1]) for seed, (a, b) in found.items()]
    return tuple(zip(*pairs, strict=True))


def _losses(group: Group, own: str) -> dict[int, tuple[float, float]]:
    found = {}
    for run in group.runs:
        metrics = run.summary["metrics"]
        others = [metrics[name] for name in metrics if name.startswith(OF_GROUPS) and name != own]
        found[int(run.setting("seed"))] = metrics[own], statistics.fmean(others)
    return found


def bias_table(rows: Sequence[BiasRow]) -> str:
    """Markdown, one line a row."""
    lines = ["| " + " | ".join(HEAD) + " |", "| " + " | ".join("---" for _ in HEAD) + " |"]
    for row in rows:
        numbers = [f"{100 * row.share:.1f}", f"{row.length:.2f}", f"{row.cosine:.3f}"]
        numbers += [f"{row.bias:.2f}", f"{row.spread:.2f}", _over_seeds(row.own)]
        cells = (row.rule, row.condition, *numbers, _over_seeds(row.others))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _over_seeds(values: Sequence[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.fmean(values):+.3f} ± {spread:.3f}"


def draw_bias(rows: Sequence[BiasRow], path: Path) -> Path:
    """Three panels over the rules, a colour and a mark for each condition: bias and spread of one
    merge, and what the group of learner 3 pays.

    Raises:
        ImportError: matplotlib is missing; the message names the extra that brings it.
    """
    rules = list(dict.fromkeys(row.rule for row in rows))
    with house_style():
        figure, panels = new_figure((1.0, 1.0, 1.3), height=11.0)
        for panel, name in zip(panels, ("bias", "spread"), strict=False):
            _draw(panel, rows, rules, name)
        panels[0].set_ylabel("bias of a merge\n(lengths of Δ)")
        panels[1].set_ylabel("spread of a merge\n(lengths of Δ)")
        panels[0].legend(ncols=3, title="learner 3 is", loc="upper left")
        _draw_losses(panels[2], rows, rules)
        panels[2].set_ylabel("final loss beside\nfault-free (nats)")
        panels[2].set_xticks(range(len(rules)), [rule.replace("_", " ") for rule in rules])
        panels[2].set_xlim(-0.5, len(rules) - 0.5)
        panels[2].set_xlabel("rule")
        return save_figure(figure, path)


def _places(rows: Sequence[BiasRow], rules: Sequence[str]) -> list[tuple[BiasRow, float, int]]:
    """Where each row stands, conditions side by side, and the number of its condition."""
    conditions = list(dict.fromkeys(row.condition for row in rows))
    found = []
    for row in rows:
        number = conditions.index(row.condition)
        aside = 0.25 * (number - (len(conditions) - 1) / 2)
        found.append((row, rules.index(row.rule) + aside, number))
    return found


def _draw(axes: Axes, rows: Sequence[BiasRow], rules: Sequence[str], name: str) -> None:
    for row, x, number in _places(rows, rules):
        colour, _ = LINES[number]
        label = row.condition if row.rule == rules[0] else None
        axes.bar(x, getattr(row, name), 0.22, color=colour, label=label)
    axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low, 1.35 * high)  # room for the legend


def _draw_losses(axes: Axes, rows: Sequence[BiasRow], rules: Sequence[str]) -> None:
    """Seeds as small marks; the means large, learner 3's group filled, the others hollow."""
    axes.axhline(0.0, color=GREY, linewidth=1.0)
    for row, x, number in _places(rows, rules):
        colour, marker = LINES[number]
        for values, aside, face in ((row.own, -0.05, colour), (row.others, 0.05, "none")):
            xs = [x + aside] * len(values)
            axes.plot(xs, values, marker, color=colour, markersize=4, alpha=0.45)
            mean = statistics.fmean(values)
            axes.plot(x + aside, mean, marker, color=colour, markersize=11, markerfacecolor=face)
    for face, label in ((GREY, "group of learner 3"), ("none", "the other groups")):
        axes.plot([], [], "o", color=GREY, markerfacecolor=face, markersize=11, label=label)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.2)  # room for the legend
    axes.legend(loc="upper left", ncols=2)
