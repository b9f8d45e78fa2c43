"""Figure of where each learner's tokens went: merged, lost (by cause), pending."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dd_lightning.report.style import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    YELLOW,
    draw_empty,
)
from dd_lightning.report.tokens import Tokens

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAUSE_COLOURS = {
    "overlap": YELLOW,
    "absent": ORANGE,
    "mixed": PURPLE,
    "rollback": GREEN,
    "dead": RED,
    "unsent": BROWN,
}
OTHER = "other"
THINNEST = 0.2  # percent of the tallest bar that can still be seen


def draw_tokens_lost(axes: Axes, tokens: Tokens, summary: Mapping[str, Any]) -> None:
    """A bar per learner, in percent of what it processed; parts too thin to see are left out."""
    learners = {name: one for name, one in summary["per_learner"].items() if one["tokens"]}
    axes.set_ylabel("% of tokens processed")
    axes.set_xlabel("learner")
    if not learners:
        draw_empty(axes, "no tokens on the tape")
        return
    parts = {name: token_parts(name, one, tokens) for name, one in learners.items()}
    colours = {"merged": BLUE, "pending": GREY, **CAUSE_COLOURS, OTHER: BLACK}
    bottoms = dict.fromkeys(learners, 0.0)
    for kind, colour in colours.items():
        heights = [parts[name].get(kind, 0.0) for name in learners]
        if max(heights) < THINNEST:
            continue
        label = kind if kind in ("merged", "pending") else f"lost: {kind}"
        axes.bar(
            range(len(learners)),
            heights,
            bottom=list(bottoms.values()),
            color=colour,
            width=0.6,
            label=label,
        )
        bottoms = {
            name: bottoms[name] + height for name, height in zip(learners, heights, strict=True)
        }
    axes.set_xticks(range(len(learners)), [name[:14] for name in learners])
    axes.set_ylim(0, 100)
    axes.grid(visible=False, axis="x")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def token_parts(name: str, learner: Mapping[str, Any], tokens: Tokens) -> dict[str, float]:
    """Percent of the learner's tokens: merged, pending and each cause of loss.

    Losses that the ledger has but the tape gives no cause for are `other`.
    """
    causes = {
        cause: raw / tokens.scale for cause, raw in tokens.lost_by_cause.get(name, {}).items()
    }
    known = {cause: causes.get(cause, 0.0) for cause in CAUSE_COLOURS}
    known[OTHER] = max(0.0, learner["tokens_lost"] - sum(known.values()))
    counts = {"merged": learner["tokens_merged"], "pending": learner["tokens_pending"], **known}
    return {kind: 100.0 * count / learner["tokens"] for kind, count in counts.items()}
